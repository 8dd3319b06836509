"""`python -m maxlib.training report RUN [RUN ...]` writes an HTML page about runs, and compares them."""

import argparse
from pathlib import Path

from maxlib.training.diagnostics.html import report


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m maxlib.training", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("report", help="one HTML page about one or more runs, which opens without a server")
    command.add_argument(
        "runs", metavar="RUN", type=Path, nargs="+", help="directories that a Trainer wrote metrics.jsonl to"
    )
    command.add_argument("--out", metavar="FILE", type=Path, help="where to (default: report.html in the first run)")
    args = parser.parse_args()
    try:
        print(report(*args.runs, out=args.out))
    except (FileNotFoundError, ValueError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()
