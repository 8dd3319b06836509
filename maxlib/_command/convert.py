"""`maxlib convert MODEL DIRECTORY`, or a .gguf file."""

import argparse
import json
from pathlib import Path

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a Hugging Face directory, or a name on the hub")
    parser.add_argument("directory", metavar="DIRECTORY", type=Path, help="a new directory, or a .gguf file")
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float16", "float32"], help="dtype of the weights (default: unchanged)"
    )
    parser.add_argument("--shard", metavar="SIZE", help="maximum file size, such as 500MB (5GB)")
    parser.add_argument(
        "--quantize",
        metavar="FORMAT",
        help="int8, nf4, ...: a directory that maxlib.quantization loads; q8_0, q4_0, ... for a .gguf file",
    )
    parser.add_argument(
        "--compressed-tensors",
        action="store_true",
        help="write quantized weights as transformers, vLLM and SGLang read them; without --quantize those of MODEL",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a directory that exists")


def run(args: argparse.Namespace) -> int:
    import maxlib
    from maxlib import quantization, weights
    from maxlib.weights.export import GENERATION, first_ids

    _check_options(args)
    shard = size(args.shard or "5GB")
    source = weights.model_directory(args.model)
    if args.directory.suffix == ".gguf":
        kind = args.quantize or args.dtype or "float16"
        weights.save_gguf(source, args.directory, dtype=kind, overwrite=args.overwrite)
        print(f"{args.directory}: {args.directory.stat().st_size / 1e9:.3f} GB")
        return 0
    keeps = args.compressed_tensors and not args.quantize
    model = maxlib.from_pretrained(source, dtype=args.dtype, keep_quantized=keeps)
    if args.compressed_tensors:
        model = quantization.for_inference(model, args.quantize) if args.quantize else model
        maxlib.save_pretrained(
            model,
            args.directory,
            max_shard_bytes=shard,
            like=source,
            overwrite=args.overwrite,
            quantized="compressed-tensors",
        )
    elif args.quantize:
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


def _check_options(args: argparse.Namespace) -> None:
    """Raises ValueError for options that would have no effect on this kind of output."""
    gguf, packed = args.directory.suffix == ".gguf", bool(args.quantize) and not args.compressed_tensors
    unread = {
        "--shard": args.shard and (gguf or packed),
        "--compressed-tensors": gguf and args.compressed_tensors,
        "--dtype": gguf and args.quantize and args.dtype,
    }
    if names := [name for name, is_unread in unread.items() if is_unread]:
        what = "a .gguf file" if gguf else "quantized weights in maxlib's format"
        raise ValueError(f"{', '.join(names)} would have no effect on {what}: leave out what is not meant")


def size(text: str) -> int:
    """Reads a number of bytes, such as 500MB."""
    unit = text.strip().upper()[-2:]
    try:
        return int(float(text.strip()[:-2]) * UNITS[unit])
    except (KeyError, ValueError):
        raise ValueError(
            f"--shard must be a number and one of {', '.join(UNITS)}, such as 500MB; got {text!r}"
        ) from None
