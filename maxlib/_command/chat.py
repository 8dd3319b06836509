"""`maxlib chat MODEL`: a conversation in the terminal."""

import argparse
import contextlib
import sys
from collections.abc import Iterator

HELP = "Type a message. /new begins another conversation, /exit or Ctrl-D ends; Ctrl-C stops an answer."


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a Hugging Face directory, or a name on the hub")
    parser.add_argument("--system", metavar="TEXT", help="system message at the beginning of each conversation")
    parser.add_argument(
        "--tokens", metavar="N", type=int, default=512, help="maximum number of tokens in an answer (%(default)s)"
    )
    parser.add_argument("--temperature", metavar="X", type=float, default=0.7, help="0 is greedy (%(default)s)")
    parser.add_argument("--top-p", metavar="X", type=float, default=0.95, help="keep the fewest tokens whose "
                        "probabilities reach X (%(default)s)")  # fmt: skip
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of sampling (%(default)s)")


def run(args: argparse.Namespace) -> int:
    import jax

    from maxlib import enable_compilation_cache, inference

    enable_compilation_cache()
    chat = inference.Chat.from_pretrained(args.model, sampler=inference.Sampler(args.temperature, top_p=args.top_p))
    beginning = [{"role": "system", "content": args.system}] if args.system else []
    chat.messages = list(beginning)
    terminal = sys.stdin.isatty()
    if terminal:
        print(HELP)
    for number, message in enumerate(_messages(terminal)):
        if message == "/new":
            chat.messages = list(beginning)
            continue
        key = jax.random.fold_in(jax.random.key(args.seed), number)
        with contextlib.suppress(KeyboardInterrupt):  # a stopped answer is not added to the conversation
            for piece in chat.stream(message, max_new_tokens=args.tokens, key=key):
                print(piece, end="", flush=True)
        print()
    return 0


def _messages(terminal: bool) -> Iterator[str]:
    """Yields what the user types, until the end of the input or /exit."""
    with contextlib.suppress(ImportError, EOFError, KeyboardInterrupt):
        if terminal:
            import readline  # noqa: F401  # arrow keys and a history for `input`
        while (message := input("> " if terminal else "").strip()) != "/exit":
            if message:
                yield message
