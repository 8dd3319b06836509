"""`python -m maxlib.observability report RUN [RUN ...]` writes an HTML page about runs, and compares them."""

import argparse
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m maxlib.observability", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_report(
        commands.add_parser("report", help="one HTML page about one or more runs, which opens without a server")
    )
    args = parser.parse_args()
    try:
        return args.run(args)
    except (FileNotFoundError, ValueError, RuntimeError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", metavar="RUN", type=Path, nargs="+", help="directories that a Trainer wrote metrics.jsonl to"
    )
    parser.add_argument("--out", metavar="FILE", type=Path, help="output file (default: report.html in the first run)")
    parser.set_defaults(run=_report)


def _report(args: argparse.Namespace) -> int:
    from maxlib.observability._report import report

    print(report(*args.runs, out=args.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
