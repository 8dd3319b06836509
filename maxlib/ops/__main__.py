"""Command line of the kernels: `python -m maxlib.ops check` compares them with float32 on this machine."""

import argparse
import sys


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns 1 if an implementation is broken."""
    from maxlib.ops._check import run

    arguments = _parser().parse_args(argv)
    try:
        rows = run.check(arguments.implementation, deadline=arguments.deadline, write=not arguments.dry)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return int(any(row["status"] in (*run.BROKEN, "failed") for row in rows))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m maxlib.ops", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="compare every implementation with float32")
    check.add_argument("implementation", nargs="*", help="names of the implementations; default: all")
    check.add_argument("--deadline", type=float, default=120.0, help="time limit per case in seconds")
    check.add_argument("--dry", action="store_true", help="do not write the results to this device's table")
    return parser


if __name__ == "__main__":
    sys.exit(main())
