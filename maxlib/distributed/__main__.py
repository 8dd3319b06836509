"""`python -m maxlib.distributed launch --directory RUN --processes 2 -- COMMAND ...` keeps a program of several
processes going.
"""

import argparse
import sys
from pathlib import Path

from maxlib.distributed._launcher import launch


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m maxlib.distributed", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    text = "start a program as several processes, and restart it when one of them dies"
    add = commands.add_parser("launch", help=text).add_argument
    text = "the run's directory, which has its metrics.jsonl"
    add("--directory", metavar="RUN", type=Path, required=True, help=text)
    text = "number of processes, and fewer if one does not come back: 4,2,1"
    add("--processes", metavar="N[,N...]", default="1", help=text)
    text = "restarts without progress before using fewer processes (default 1)"
    add("--retries", metavar="N", type=int, default=1, help=text)
    add("--grace", metavar="S", type=float, default=10.0, help="seconds for the other processes to end (default 10)")
    add("command", metavar="COMMAND", nargs="+", help="after --: the command of each process")
    args = parser.parse_args()
    try:
        counts = [int(count) for count in args.processes.split(",")]
        return launch(args.command, args.directory, processes=counts, retries=args.retries, grace=args.grace)
    except (FileNotFoundError, ValueError, RuntimeError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
