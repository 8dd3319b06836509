"""`python -m maxlib.training report RUN [RUN ...]` writes an HTML page about runs, and compares them;
`python -m maxlib.training supervise --directory RUN --processes 2 -- COMMAND ...` keeps one going.
"""

import argparse
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m maxlib.training", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_report(
        commands.add_parser("report", help="one HTML page about one or more runs, which opens without a server")
    )
    _add_supervise(
        commands.add_parser("supervise", help="start a program as several processes, and again when one of them dies")
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
    parser.add_argument("--out", metavar="FILE", type=Path, help="where to (default: report.html in the first run)")
    parser.set_defaults(run=_report)


def _report(args: argparse.Namespace) -> int:
    from maxlib.training.diagnostics.html import report

    print(report(*args.runs, out=args.out))
    return 0


def _add_supervise(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--directory", metavar="RUN", type=Path, required=True, help="the run's directory, the one of its metrics.jsonl"
    )
    add(
        "--processes", metavar="N[,N...]", default="1", help="how many, and how many when one does not come back: 4,2,1"
    )
    add("--retries", metavar="N", type=int, default=1, help="restarts without progress before fewer (default 1)")
    add("--grace", metavar="S", type=float, default=10.0, help="seconds for the others to end (default 10)")
    add("command", metavar="COMMAND", nargs="+", help="after --: what each process runs")
    parser.set_defaults(run=_supervise)


def _supervise(args: argparse.Namespace) -> int:
    from maxlib.training.supervise import supervise

    counts = [int(count) for count in args.processes.split(",")]
    return supervise(args.command, args.directory, processes=counts, retries=args.retries, grace=args.grace)


if __name__ == "__main__":
    sys.exit(main())
