"""Prints the losses of the small run; `--write` stores them for this machine architecture and version of jax."""

import argparse

from tests.training import losses

parser = argparse.ArgumentParser(prog="python -m tests.training.losses", description=__doc__)
parser.add_argument("--write", action="store_true", help="write the file that the tests compare with")
args = parser.parse_args()
text = losses.compute()
if args.write:
    losses.file().write_text(text)
    print(f"wrote {losses.file().relative_to(losses.ROOT)}")
else:
    print(text, end="")
