"""`maxlib report RUN [RUN ...]`."""

import argparse
from pathlib import Path


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", type=Path, nargs="+", help="directories with a metrics.jsonl")
    parser.add_argument("--out", metavar="FILE", type=Path, help="the page (default: report.html in the first run)")


def run(args: argparse.Namespace) -> int:
    from maxlib.observability import report

    print(report(*args.runs, out=args.out))
    return 0
