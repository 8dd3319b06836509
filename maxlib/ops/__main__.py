"""Command line of the kernels: `python -m maxlib.ops check` tests and times them on this machine, `tune` chooses their
tiles.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns 1 if an implementation is broken."""
    arguments = _parser().parse_args(argv)
    if arguments.command == "worker":
        return _worker(arguments)
    from maxlib.ops._check import parent

    try:
        if arguments.command == "check" and arguments.json:
            arguments.json.write_text("")  # an error now rather than after the last case
        if arguments.command == "tune":
            parent.tune(arguments.implementation or None, deadline=arguments.deadline, rounds=arguments.rounds)
            return 0
        options = {"deadline": arguments.deadline, "rounds": arguments.rounds, "write": not arguments.dry}
        rows = parent.check(arguments.implementation or None, **options)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        parent.save(rows, arguments.json)
    return int(any(row["status"] in (*parent.BROKEN, "failed") for row in rows))


def _worker(arguments: argparse.Namespace) -> int:
    from maxlib.ops._check import worker

    if arguments.describe:
        worker.say(iter([worker.describe()]))
    elif arguments.tune:
        worker.say(worker.tune(arguments.names, json.loads(arguments.skip), arguments.rounds))
    else:
        worker.say(worker.check(arguments.names[0], arguments.names[1], json.loads(arguments.skip), arguments.rounds))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m maxlib.ops", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="{check,tune}")
    check = commands.add_parser("check", help="compare every implementation with float32 and time it")
    check.add_argument("--dry", action="store_true", help="do not write the results to this device's table")
    check.add_argument("--json", type=Path, help="also write one line of JSON per case to this file")
    tune = commands.add_parser(
        "tune", help="try every kernel's tile sizes and write the fastest to this device's table"
    )
    for command in (check, tune):
        command.add_argument("implementation", nargs="*", help="names of the implementations; default: all")
        command.add_argument("--deadline", type=_positive(float), default=120.0, help="time limit per case in seconds")
        command.add_argument("--rounds", type=_positive(int), default=5, help="number of rounds of ten timed calls")
    worker = commands.add_parser("worker")  # without a help text it is not listed
    worker.add_argument("names", nargs="*")
    worker.add_argument("--describe", action="store_true")
    worker.add_argument("--tune", action="store_true")
    worker.add_argument("--skip", default="[]")
    worker.add_argument("--rounds", type=int, default=5)
    return parser


def _positive(kind: type[int] | type[float]) -> Callable[[str], float]:
    """Returns a function that reads a number above 0."""

    def read(text: str) -> float:
        if (number := kind(text)) <= 0:
            raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
        return number

    read.__name__ = kind.__name__  # which argparse names when the text is no number
    return read


if __name__ == "__main__":
    sys.exit(main())
