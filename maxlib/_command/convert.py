"""`maxlib convert MODEL DIRECTORY`."""

import argparse
import json
from pathlib import Path

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a Hugging Face directory, or a name on the hub")
    parser.add_argument("directory", metavar="DIRECTORY", type=Path, help="a new directory")
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float16", "float32"], help="dtype of the weights (default: unchanged)"
    )
    parser.add_argument("--shard", metavar="SIZE", default="5GB", help="maximum file size, such as 500MB (%(default)s)")
    parser.add_argument(
        "--quantize", metavar="FORMAT", help="int8, nf4, ...: a directory that maxlib.quantization loads"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a directory that exists")


def run(args: argparse.Namespace) -> int:
    import maxlib
    from maxlib import quantization, weights
    from maxlib.weights.export import GENERATION, first_ids

    shard = size(args.shard)
    source = weights.model_directory(args.model)
    model = maxlib.from_pretrained(source, dtype=args.dtype)
    if args.quantize:
        low = quantization.for_inference(model, args.quantize)
        quantization.save(low, args.directory, like=source, overwrite=args.overwrite)
    else:
        maxlib.save_pretrained(model, args.directory, max_shard_bytes=shard, like=source, overwrite=args.overwrite)
    if not (args.directory / GENERATION).exists():  # then only config.json has the end-of-text ids
        config = json.loads((source / "config.json").read_text(encoding="utf-8"))
        if ids := {k: v for k, v in first_ids(config, config.get("text_config") or {}).items() if v is not None}:
            (args.directory / GENERATION).write_text(json.dumps(ids, indent=2) + "\n")
    files = sorted(args.directory.glob("*.safetensors"))
    print(f"{args.directory}: {len(files)} files, {sum(file.stat().st_size for file in files) / 1e9:.3f} GB")
    return 0


def size(text: str) -> int:
    """Reads a number of bytes, such as 500MB."""
    unit = text.strip().upper()[-2:]
    try:
        return int(float(text.strip()[:-2]) * UNITS[unit])
    except (KeyError, ValueError):
        raise ValueError(
            f"--shard must be a number and one of {', '.join(UNITS)}, such as 500MB; got {text!r}"
        ) from None
