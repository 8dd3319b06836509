"""Draw pictures of shapes with questions about them, and save a small untrained vision model.

    python examples/shapes.py runs/shapes
    python examples/finetune.py runs/shapes/model runs/shapes/chats.jsonl --chats --steps 100 --batch-size 4 \\
        --length 256 --patches 640 --learning-rate 3e-3

Needs Pillow. Each line of chats.jsonl is a chat about one picture; the pictures may differ in size.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx
from PIL import Image

import maxlib
from maxlib import ops, tokenization
from maxlib.models import qwen3_vl

COLORS = {"red": (214, 40, 40), "green": (44, 150, 75), "blue": (40, 80, 220), "yellow": (245, 200, 40)}
# Each shape's test for points of the square from -1 to 1; y points down.
SHAPES = {
    "circle": lambda x, y: x**2 + y**2 < 0.8,
    "square": lambda x, y: np.maximum(abs(x), abs(y)) < 0.8,
    "triangle": lambda x, y: (y < 0.8) & (abs(x) < (y + 0.9) / 2),
}
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}{% if part.type == 'image' -%}
<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
PATCH, MERGE = 8, 2  # one token per 16 x 16 pixels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", metavar="DIR", type=Path, help="output directory")
    parser.add_argument(
        "--pictures", metavar="N", type=int, default=2000, help="number of pictures, with one chat each (%(default)s)"
    )
    parser.add_argument("--dim", metavar="N", type=int, default=64, help="width of the model (%(default)s)")
    parser.add_argument(
        "--seed", metavar="N", type=int, default=0, help="seed of the pictures and the model (%(default)s)"
    )
    args = parser.parse_args()
    (args.out / "images").mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(args.seed)
    chats = [picture_and_chat(rng, args.out, f"images/{i:05}.png") for i in range(args.pictures)]
    (args.out / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    save_model(args.out / "model", [text_of(chat) for chat in chats], args)
    print(f"{len(chats)} pictures with chats are in {args.out}, and a model in {args.out / 'model'}")


def picture_and_chat(rng: np.random.Generator, out: Path, name: str) -> list[dict]:
    """Saves a picture of one to three shapes in a row; returns a question about each of their properties."""
    count = int(rng.integers(1, 4))
    shapes = [str(shape) for shape in rng.permutation(list(SHAPES))[:count]]
    colors = [str(color) for color in rng.choice(list(COLORS), size=count)]
    Image.fromarray(draw(rng, shapes, colors)).save(out / name)
    asked = int(rng.integers(count))
    turns = [
        ("How many shapes are there?", str(count)),
        (f"What color is the {shapes[asked]}?", colors[asked]),
        ("What is on the left?", f"a {colors[0]} {shapes[0]}"),
    ]
    (first, answer), *others = [turns[i] for i in rng.permutation(len(turns))]
    chat = [
        turn("user", [{"type": "image", "image": name}, {"type": "text", "text": first}]),
        turn("assistant", answer),
    ]
    return chat + [turn(*said) for pair in others for said in zip(("user", "assistant"), pair, strict=True)]


def turn(role: str, content: str | list) -> dict:
    return {"role": role, "content": content}


def draw(rng: np.random.Generator, shapes: list[str], colors: list[str]) -> np.ndarray:
    """Draws a picture `H W 3` on light gray, with one column per shape."""
    height, width = (int(side) for side in rng.integers(36, 90, size=2))
    width = max(width, 28 * len(shapes))
    picture = np.full((height, width, 3), rng.integers(200, 250), np.uint8)
    y, x = np.mgrid[:height, :width]
    for i, (shape, color) in enumerate(zip(shapes, colors, strict=True)):
        column = width / len(shapes)
        radius = rng.uniform(0.65, 1) * min(column, height) / 2
        middle = (i + 0.5) * column, rng.uniform(radius, height - radius)
        inside = SHAPES[shape]((x - middle[0]) / radius, (y - middle[1]) / radius)
        picture[inside] = COLORS[color]
    return picture


def text_of(chat: list[dict]) -> str:
    """Returns the text of a chat, to train the tokenizer."""
    parts = [m["content"] if isinstance(m["content"], str) else m["content"][-1]["text"] for m in chat]
    return "\n".join(["user", "assistant", *parts])


def save_model(directory: Path, texts: list[str], args) -> None:
    """Saves a small random Qwen3-VL as a Hugging Face directory, with tokenizer and processor files."""
    tokenizer = tokenization.train_bpe(texts, vocab_size=320, special_tokens=SPECIAL)
    ids = dict(zip(("start", "end", "image", "video"), map(tokenizer.token_to_id, SPECIAL[2:]), strict=True))
    tokens: Any = {f"{name}_token": id for name, id in ids.items()}
    vision = qwen3_vl.Vision(
        dim=args.dim, mlp_dim=2 * args.dim, num_layers=3, num_heads=4, patch_size=PATCH, merge=MERGE, num_positions=64,
        deepstack=(0, 1), **tokens,
    )  # fmt: skip
    config = qwen3_vl.Config(
        vocab=320, num_layers=3, dim=args.dim, mlp_dim=2 * args.dim, num_heads=4, num_kv_heads=2, head_dim=32, tied=True,
        rope=ops.Rope(32, 10_000.0, max_length=1024), sections=(6, 5, 5), vision=vision,
    )  # fmt: skip
    end = tokenizer.token_to_id("<|im_end|>")
    model = qwen3_vl.Qwen3VL(config, rngs=nnx.Rngs(args.seed))
    maxlib.save_pretrained(model, directory, generation={"eos_token_id": end}, overwrite=True)
    tokenization.save_tokenizer(tokenizer, directory, eos_token="<|im_end|>")
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    prepared = {
        "patch_size": PATCH,
        "merge_size": MERGE,
        "temporal_patch_size": vision.frames,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "size": {"shortest_edge": 1024, "longest_edge": 16384},
        "image_processor_type": "Qwen2VLImageProcessor",
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(prepared, indent=2))


if __name__ == "__main__":
    main()
