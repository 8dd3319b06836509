"""`maxlib new-trainer NAME`: copies an example trainer, for you to change."""

import argparse
from pathlib import Path

EXAMPLES = ("pretrain", "finetune", "prefer", "reinforce", "agent", "distill", "mixture")


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", type=Path, help="the file to write, such as mine.py")
    parser.add_argument("--from", dest="example", choices=EXAMPLES, default=EXAMPLES[0], help="(%(default)s)")


def run(args: argparse.Namespace) -> int:
    target = args.name if args.name.suffix == ".py" else args.name.with_name(f"{args.name.name}.py")
    text = example(args.example).read_text()
    if target.exists():
        raise FileExistsError(f"{target} exists already and is kept: give another name, or remove it")
    target.write_text(text)
    print(f"{target} is a copy of examples/{args.example}.py. Try it: python {target} --help")
    return 0


def example(name: str) -> Path:
    """Finds an example in the installed package, or in the repository of an editable install."""
    package = Path(__file__).parents[1]
    places = [package / "_examples" / f"{name}.py", package.parent / "examples" / f"{name}.py"]
    path = next((place for place in places if place.exists()), None)
    if path is None:
        raise FileNotFoundError(f"examples/{name}.py must be installed with maxlib, but is at none of {places}")
    return path
