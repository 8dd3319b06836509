"""`maxlib serve MODEL`: a server with OpenAI's API."""

import argparse
import os


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a Hugging Face directory, or a name on the hub")
    parser.add_argument("--name", metavar="NAME", help="name of the model for clients (MODEL)")
    parser.add_argument("--host", metavar="HOST", default="127.0.0.1", help="address to listen on (%(default)s)")
    parser.add_argument("--port", metavar="N", type=int, default=8000, help="port, 0 for a free one (%(default)s)")
    parser.add_argument("--slots", metavar="N", type=int, default=8, help="rows decoded at once (%(default)s)")
    parser.add_argument(
        "--max-length", metavar="N", type=int, help="maximum number of tokens of a prompt and its completion"
    )
    parser.add_argument("--dtype", metavar="DTYPE", default="bfloat16", help="of the computation (%(default)s)")
    parser.add_argument("--cache-dtype", metavar="DTYPE", help="of cached keys and values (that of the computation)")
    parser.add_argument("--num-drafts", metavar="N", type=int, default=0, help="drafts of n-grams (%(default)s)")
    parser.add_argument("--cache-tokens", metavar="N", type=int, help="tokens for which there is memory (as needed)")
    parser.add_argument("--tensor", metavar="N", type=int, default=1, help="devices to split the model over (1)")
    parser.add_argument(
        "--api-key-env", metavar="VARIABLE", default="MAXLIB_API_KEY",
        help="environment variable with the key that clients must send; none if it is not set (%(default)s)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    from maxlib import enable_compilation_cache, inference, keep_freed_memory

    keep_freed_memory()  # each step on a CPU frees what the next one takes
    enable_compilation_cache()
    inference.serve(
        args.model,
        name=args.name,
        host=args.host,
        port=args.port,
        slots=args.slots,
        max_length=args.max_length,
        dtype=args.dtype,
        cache_dtype=args.cache_dtype,
        num_drafts=args.num_drafts,
        cache_tokens=args.cache_tokens,
        tensor=args.tensor,
        api_key=os.environ.get(args.api_key_env) or None,
    )
    return 0
