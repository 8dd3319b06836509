"""The command `maxlib`: a thin layer over public functions. `maxlib --help` lists the subcommands."""

import argparse
import importlib
import os
import sys

# Each module has `add(parser)` for its options and `run(args)`, which returns the exit status.
COMMANDS = {
    "plan": "does a training step fit on hardware that you do not have, and how fast can it be?",
    "generate": "generate text with a model, streaming it",
    "chat": "talk with a model",
    "serve": "serve a model with OpenAI's API",
    "convert": "write a model in another dtype, shard size or number of bits, or as GGUF",
    "inspect": "list the arrays of a directory or checkpoint, or what differs between two",
    "models": "list model families and presets",
    "report": "make an HTML page about one or more runs",
    "doctor": "print versions, devices, extras and the kernels that would be chosen",
    "new-trainer": "copy an example trainer, to change it",
}


def main(argv: list[str] | None = None) -> int:
    """Runs a command.

    Args:
        argv: The words after `maxlib`; by default those of this process.

    Returns:
        The exit status: 0 for success, 1 for a negative result (a plan that does not fit, two checkpoints that differ),
        2 for bad input.
    """
    argv = sys.argv[1:] if argv is None else argv
    if not argv:
        parser(None).print_help(sys.stderr)
        return 2
    args = parser(argv[0]).parse_args(argv)
    try:
        status = args.run(args)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        print(f"maxlib {args.command}: {error}", file=sys.stderr)
        return 2


def parser(command: str | None = None) -> argparse.ArgumentParser:
    """Returns the parser, with the options of `command` only, so that the other commands need not be imported."""
    top = argparse.ArgumentParser(prog="maxlib", description="LLM building blocks on JAX and Flax NNX.")
    from maxlib import __version__

    top.add_argument("--version", action="version", version=f"maxlib {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in COMMANDS.items():
        subparser = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:].removesuffix('?')}.")
        if name == command:
            module = importlib.import_module(f"maxlib._command.{name.replace('-', '_')}")
            module.add(subparser)
            subparser.set_defaults(run=module.run)
    return top
