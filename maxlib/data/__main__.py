"""`python -m maxlib.data tokenize PATH ... --tokenizer FILE --out DIR` tokenizes ahead of time."""

import argparse
from pathlib import Path

from rich.progress import Progress
from tokenizers import Tokenizer

from maxlib.data import files, write_tokens
from maxlib.tokenization import load_tokenizer


def main() -> None:
    args = arguments()
    try:
        tokenize(args)
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
    return parser.parse_args()


def tokenize(args: argparse.Namespace) -> None:
    tokenizer = load_tokenizer(args.tokenizer)
    documents = files(args.paths, field=args.field)
    with Progress() as bar:
        task = bar.add_task("tokenizing", total=len(documents))

        def progress(counts) -> None:
            bar.update(task, completed=counts.documents, description=f"{counts.tokens:,} tokens")

        manifest = write_tokens(
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
    total = manifest["total"]
    print(
        f"{args.out}: {total['documents']:,} documents, {total['tokens']:,} tokens, "
        f"{total['characters'] / total['tokens']:.2f} characters per token, {manifest['bad_records']:,} bad records"
    )


def token_id(tokenizer: Tokenizer, token: str | None) -> int | None:
    if token is None:
        return None
    if (id := tokenizer.token_to_id(token)) is None:
        raise ValueError(f"{token!r} is not in the tokenizer's vocabulary.")
    return id


if __name__ == "__main__":
    main()
