"""`maxlib generate MODEL PROMPT`."""

import argparse
import json
import time


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a Hugging Face directory, or a name on the hub")
    parser.add_argument("prompt", metavar="PROMPT", help="a user's message; with --raw a text to continue")
    parser.add_argument("--raw", action="store_true", help="continue the text instead of answering it")
    parser.add_argument(
        "--tokens", metavar="N", type=int, default=256, help="maximum number of new tokens (%(default)s)"
    )
    parser.add_argument("--temperature", metavar="X", type=float, default=0.0, help="0 is greedy (%(default)s)")
    parser.add_argument("--top-p", metavar="X", type=float, help="keep the fewest tokens whose probabilities reach X")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of sampling (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print one object when the text is complete")


def run(args: argparse.Namespace) -> int:
    import jax

    from maxlib import enable_compilation_cache, inference

    if args.top_p is not None and not args.temperature:
        raise ValueError("--top-p needs a --temperature above 0, with which tokens are drawn, such as 0.7")
    enable_compilation_cache()
    chat = inference.Chat.from_pretrained(args.model, sampler=inference.Sampler(args.temperature, top_p=args.top_p))
    write = chat.complete if args.raw else chat.stream
    begin, text = time.perf_counter(), ""
    for piece in write(args.prompt, max_new_tokens=args.tokens, key=jax.random.key(args.seed)):
        text += piece
        if not args.json:
            print(piece, end="", flush=True)
    seconds = round(time.perf_counter() - begin, 3)
    print(json.dumps({"text": text, "seconds": seconds}) if args.json else "")
    return 0
