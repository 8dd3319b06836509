"""`python -m maxlib.distributed launch --directory RUN --processes 2 -- COMMAND ...` keeps a program of several
processes going.
"""

import argparse
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m maxlib.distributed", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_launch(
        commands.add_parser("launch", help="start a program as several processes, and restart it when one of them dies")
    )
    args = parser.parse_args()
    try:
        return args.run(args)
    except (FileNotFoundError, ValueError, RuntimeError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2


def _add_launch(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--directory", metavar="RUN", type=Path, required=True, help="the run's directory, which has its metrics.jsonl")
    add(
        "--processes",
        metavar="N[,N...]",
        default="1",
        help="number of processes, and fewer if one does not come back: 4,2,1",
    )
    add(
        "--retries",
        metavar="N",
        type=int,
        default=1,
        help="restarts without progress before using fewer processes (default 1)",
    )
    add("--grace", metavar="S", type=float, default=10.0, help="seconds for the other processes to end (default 10)")
    add("command", metavar="COMMAND", nargs="+", help="after --: the command of each process")
    parser.set_defaults(run=_launch)


def _launch(args: argparse.Namespace) -> int:
    from maxlib.distributed._launcher import launch

    counts = [int(count) for count in args.processes.split(",")]
    return launch(args.command, args.directory, processes=counts, retries=args.retries, grace=args.grace)


if __name__ == "__main__":
    sys.exit(main())
