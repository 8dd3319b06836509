"""Finetune a Hugging Face model on your text and export it. Fork me.

The default text is Python's own documentation (help topics and docstrings); pass text or .jsonl files to use yours.
With --chats each line of a .jsonl file is a chat, with images for a vision model, and only its answers are trained on.
Run the same command again to resume. Ctrl-C saves first.
"""

import argparse
import dataclasses
import functools
import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx
from tokenizers import Tokenizer

import maxlib
from maxlib import adapters, checkpoint, data, inference, nn, sharding, tokenization, training, weights

DTYPE = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16  # CPUs have no fast bfloat16
# The format of chats for a model without a template of its own, such as a base model.
PLAIN = (
    "{% for m in messages %}{{ m.role }}:\n{{ m.content }}{{ eos_token if m.role == 'assistant' }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:\n{% endif %}"
)


def main() -> None:
    args = arguments()
    layout = sharding.Layout(sharding.make_mesh(fsdp=-1), sharding.FSDP) if jax.device_count() > 1 else None
    tokenizer = tokenization.load_tokenizer(args.model)
    tokenize, train, held_out = documents(tokenizer, args)
    held_out_loader = loader(tokenize(held_out), args, num_shards=1)
    model = maxlib.from_pretrained(args.model, dtype=jnp.float32, layout=layout)
    if args.lora:
        model = adapters.add(model, adapters.LoRA(args.lora, 2 * args.lora), rngs=nnx.Rngs(0))
    schedule = training.warmup_cosine(args.learning_rate, args.steps, warmup=args.steps // 10)
    trainer = training.Trainer(
        model,
        optimizer=training.adamw(schedule),
        loader=loader(tokenize(train).shuffle(seed=0).repeat(), args),
        dtype=DTYPE,
        remat="full",
        microbatches=args.microbatches,
        directory=args.out,
        layout=layout,
        log_schedule=schedule,
        evaluation=training.Evaluation(held_out_loader),
        checkpointer=checkpoint.Checkpointer(
            args.out / "checkpoints", every=max(args.steps // 4, 1), base=args.model if args.lora else None
        ),
        timeout=1800,  # ends a process that hangs, so that whoever started it can start it again
    )
    del model  # the trainer has a copy
    trainer.restore()
    if trainer.step == 0:
        trainer.log(f"before: {shown(trainer.evaluate())}")
    trainer.log(f"after: {shown(trainer.fit(args.steps))}")
    if args.images:
        step = jax.jit(training.make_eval_step(training.NextToken(), dtype=DTYPE))
        for name, others in without_their_images(held_out, tokenize, args).items():
            with trainer.sharded():
                metrics = training.evaluate(step, trainer.state, training.Prefetch(others, layout=layout))
            trainer.log(f"after, {name}: {shown(metrics, '')}")
    model = trainer.model
    if args.lora:
        print("\n".join(adapters.save(model, args.out / "adapter", base=args.base, overwrite=True)))
        model = adapters.merge(model)
    target = args.out / "model"
    template = args.template if args.chats else None  # the format that it was trained on
    maxlib.save_pretrained(model, target, like=args.model, chat_template=template, overwrite=True)
    command = f"chat {target}" if args.chats else f"generate {target} {args.prompt!r} --raw"
    print(f"\nThe model is {target}; try it with: maxlib {command}")
    if args.chats:
        show_answer(model, tokenizer, tokenize(held_out), args)
    else:
        show_sample(model, tokenizer, args)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = functools.partial(parser.add_argument, metavar="N", type=int)
    add("model", metavar="MODEL", type=str, help="a Hugging Face directory, or a name on the hub")
    add("files", metavar="FILE", type=Path, nargs="*", help="text or .jsonl files, or folders of text files")
    parser.add_argument("--chats", action="store_true", help="the files are chats; train on their answers only")
    add("--patches", default=1024, help="image patches in a row, for vision models (%(default)s)")
    add(
        "--field",
        metavar="NAME",
        type=str,
        default="text",
        help="field of a .jsonl line that has the text (%(default)s)",
    )
    add("--out", metavar="DIR", type=Path, default=Path("runs/finetune"), help="output directory (%(default)s)")
    add("--steps", default=100, help="number of optimizer steps (%(default)s)")
    add("--batch-size", default=8, help="rows per step (%(default)s)")
    add("--microbatches", default=1, help="microbatches per step, to use less memory (%(default)s)")
    add("--length", default=512, help="tokens per row (%(default)s)")
    add("--validation", metavar="X", type=float, default=0.05, help="fraction of documents to hold out (%(default)s)")
    add("--learning-rate", metavar="X", type=float, help="peak learning rate (2e-5; 2e-4 with --lora)")
    add(
        "--lora", metavar="RANK", default=0, help="train only adapters of this rank; 0 trains all weights (%(default)s)"
    )
    add("--prompt", metavar="TEXT", type=str, default="The ", help="prompt of the sample (%(default)r)")
    args = parser.parse_args()
    args.learning_rate = args.learning_rate or (2e-4 if args.lora else 2e-5)
    args.base, args.model = args.model, weights.model_directory(args.model)
    args.images = image_processor(args.model) if args.chats else None
    args.template = tokenization.ChatTemplate.from_directory(args.model, default=PLAIN)
    return args


def image_processor(directory: Path) -> data.ImageProcessor | None:
    """Returns the processor of the chats' images; None for text models and if only text can be prepared."""
    try:
        return data.ImageProcessor.from_directory(directory)
    except FileNotFoundError:
        return None
    except ValueError as error:
        print(f"Chats with images are refused. {error}")
        return None


def documents(tokenizer: Tokenizer, args):
    """Returns the tokenize function, and the documents for training and evaluation."""
    if args.chats:
        read = data.chats(args.files)
        tokenize = lambda part: data.tokenize_chats(part, tokenizer, args.template, images=args.images)
    else:
        read = data.files(args.files, field=args.field, document="paragraph") if args.files else data.python_docs()
        ids = special_ids(args.model)
        tokenize = lambda part: data.tokenize(part, tokenizer, **ids)
    return tokenize, *data.split(read, validation=args.validation)


def loader(tokens, args, *, change=lambda row: row, num_shards: int | None = None) -> data.Loader:
    """Returns a loader of packed rows, with the images of their chats."""
    blank = args.images and args.images.blank(args.patches)
    overlong = (
        "truncate" if args.chats else "split"
    )  # an answer in a row of its own would be learned without its question
    rows = lambda part: data.pack(tokens[part], length=args.length, overlong=overlong, images=blank).map(change)
    return data.Loader(rows, batch_size=args.batch_size, num_shards=num_shards)


def without_their_images(held_out, tokenize, args) -> dict[str, data.Loader]:
    """Returns loaders of held-out chats with wrong images: a model that ignores images does as well on them."""
    chats = [chat for i in range(len(held_out)) if (chat := held_out[i]) is not None]
    others = data.records(
        [with_images_of(*pair) for pair in zip(chats, [*chats[1:], chats[0]], strict=True)], field="messages"
    )
    middle = 0.5 - args.images.mean[1]  # numbers from 0 to 1 (Gemma 4), or around zero
    grey = lambda row: row | {"images": dataclasses.replace(row["images"], pixels=0 * row["images"].pixels + middle)}
    make = functools.partial(loader, args=args, num_shards=1)
    return {"images of other chats": make(tokenize(others)), "grey images": make(tokenize(held_out), change=grey)}


def with_images_of(chat: dict, other: dict) -> dict:
    """Returns `chat` with the images of `other`, repeated as needed."""
    parts = lambda message: message["content"] if isinstance(message["content"], list) else []
    images = itertools.cycle(part for m in other["messages"] for part in parts(m) if part["type"] == "image")
    swapped = lambda m: [next(images, part) if part["type"] == "image" else part for part in parts(m)]
    return chat | {"messages": [m | ({"content": swapped(m)} if parts(m) else {}) for m in chat["messages"]]}


def shown(metrics: dict, prefix: str = "eval/") -> str:
    nll, accuracy = (float(metrics[prefix + name]) for name in ("nll", "accuracy"))
    return f"{nll:.3f} nats per token of held-out text, {accuracy:.1%} of tokens right"


def special_ids(directory: Path) -> dict[str, int | None]:
    """Returns the ids at the beginning and end of a document; if there are several end ids, the first."""
    read = lambda name: json.loads((directory / name).read_text()) if (directory / name).exists() else {}
    config, ids = read("config.json"), {}
    for fields in (read("generation_config.json"), config.get("text_config", {}), config):
        ids |= {name: value for name, value in fields.items() if value is not None}
    bos, eos = ids.get("bos_token_id"), ids.get("eos_token_id")
    return {"bos_id": bos, "eos_id": eos[0] if isinstance(eos, list) else eos}


def show_sample(model, tokenizer: Tokenizer, args) -> None:
    print(f"\nA sample: {args.prompt}", end="")
    write(model, tokenizer, args.prompt, args, sampler=inference.Sampler(temperature=0.7, top_p=0.95))


def show_answer(model, tokenizer: Tokenizer, held_out, args) -> None:
    """Prints the model's answer to the first question of a held-out chat."""
    chat = next(chat for i in range(len(held_out)) if (chat := held_out[i]) is not None)
    prompt = chat["tokens"][: (chat["targets"] >= 0).argmax() + 1].tolist()
    images = chat.get("images")
    print(f"\nA held-out chat: {tokenizer.decode(prompt)}\nThe model's answer: ", end="")
    seen = {} if images is None else {"images": nn.vision.pad_patches(images.pixels, images.grids)}
    write(model, tokenizer, prompt, args, **seen)


def write(model, tokenizer: Tokenizer, prompt, args, **options) -> None:
    generator, ends = inference.Generator(model, dtype=DTYPE), inference.stop_tokens(args.out / "model")
    for piece in inference.stream_text(generator, tokenizer, prompt, max_new_tokens=60, stop_token_ids=ends, **options):
        print(piece, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
