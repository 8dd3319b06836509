"""`python -m maxlib.data tokenize PATH ... --tokenizer FILE --out DIR` tokenizes ahead of time; `show DIR` describes
the result.
"""

import argparse
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from tokenizers import Tokenizer

from maxlib.data import files, read_manifest, write_tokens
from maxlib.tokenization import load_tokenizer


def main() -> None:
    args = arguments()
    try:
        tokenize(args) if args.command == "tokenize" else show(args.directory)
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from error


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m maxlib.data", description="Tokens on disk.")
    commands = parser.add_subparsers(dest="command", required=True)
    work = commands.add_parser(
        "tokenize", help="tokenize documents to ArrayRecord files; run the same command again to continue"
    )
    work.add_argument("paths", nargs="+", metavar="PATH", help="text, .jsonl, .parquet, folders or patterns")
    work.add_argument("--tokenizer", type=Path, required=True, metavar="FILE", help="tokenizer.json or its folder")
    work.add_argument("--out", type=Path, required=True, metavar="DIR", help="output folder of the tokens")
    work.add_argument("--field", default="text", metavar="NAME", help="field with the text (%(default)s)")
    work.add_argument("--bos", metavar="TOKEN", help="token before each document (none)")
    work.add_argument("--eos", metavar="TOKEN", help="token after each document (none)")
    work.add_argument("--documents-per-file", type=int, default=50_000, metavar="N", help="(%(default)s)")
    work.add_argument(
        "--bad-records", type=int, default=0, metavar="N", help="maximum number of bad records (%(default)s)"
    )
    commands.add_parser("show", help="describe a folder of tokens").add_argument("directory", type=Path)
    return parser.parse_args()


def tokenize(args: argparse.Namespace) -> None:
    tokenizer = load_tokenizer(args.tokenizer)
    documents = files(args.paths, field=args.field)
    columns = (
        TextColumn("{task.fields[text]}"),
        BarColumn(),
        TextColumn("{task.percentage:.0f}%"),
        TimeRemainingColumn(),
    )
    begin = time.perf_counter()
    with Progress(*columns) as bar:
        task = bar.add_task("", total=len(documents), text="tokenizing")

        def progress(counts) -> None:
            minutes, seconds = divmod(int(time.perf_counter() - begin), 60)
            bar.update(task, completed=counts.documents, text=f"{counts.tokens:,} tokens, {minutes}:{seconds:02}")

        write_tokens(
            documents,
            args.out,
            tokenizer,
            bos_id=token_id(tokenizer, args.bos),
            eos_id=token_id(tokenizer, args.eos),
            documents_per_file=args.documents_per_file,
            bad_records=args.bad_records,
            description=f"{' '.join(args.paths)}, field {args.field}",
            progress=progress,
        )
    show(args.out)


def token_id(tokenizer: Tokenizer, token: str | None) -> int | None:
    if token is None:
        return None
    if (id := tokenizer.token_to_id(token)) is None:
        raise ValueError(f"{token!r} is not in the tokenizer's vocabulary.")
    return id


def show(directory: Path) -> None:
    manifest = read_manifest(directory)
    total = manifest["total"]
    size = sum(file["bytes"] for file in manifest["files"])
    table = Table(title=f"{directory}: {manifest['description']}", show_header=False)
    table.add_row("documents", f"{total['documents']:,}")
    table.add_row("tokens", f"{total['tokens']:,}")
    table.add_row("tokens per document", f"{total['tokens'] / total['documents']:,.1f} (longest {total['longest']:,})")
    table.add_row("characters per token", f"{total['characters'] / total['tokens']:.2f}")
    table.add_row("vocabulary", f"{manifest['vocab_size']:,}")
    table.add_row("bad records", f"{manifest['bad_records']:,}")
    table.add_row("files", f"{len(manifest['files'])}, {size / 1e6:,.1f} MB")
    Console().print(table)


if __name__ == "__main__":
    main()
