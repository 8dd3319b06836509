"""Trains a Hugging Face model further on your text, and exports it back. Fork me.

By default the text is what every Python carries (its help topics and docstrings); give text or .jsonl files for your
own. Run the same command again to resume. Ctrl-C saves first.
"""

import argparse
import functools
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx
from tokenizers import Tokenizer

import maxlib
from maxlib import adapters, checkpoint, data, inference, sharding, tokenization, training, weights

DTYPE = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16  # CPUs have no fast bfloat16
KEPT = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "preprocessor_config.json",
    "processor_config.json",
)


def main() -> None:
    args = arguments()
    layout = sharding.Layout(sharding.make_mesh(fsdp=-1), sharding.FSDP) if jax.device_count() > 1 else None
    tokenizer = tokenization.load_tokenizer(args.model)
    train, held_out = loaders(tokenizer, args)
    model = maxlib.from_pretrained(args.model, dtype=jnp.float32, layout=layout)
    if args.lora:
        model = adapters.add(model, adapters.LoRA(args.lora, 2 * args.lora), rngs=nnx.Rngs(0))
    loss = functools.partial(training.next_token_loss, dtype=DTYPE, remat="full")
    schedule = training.warmup_cosine(args.learning_rate, args.steps, warmup=args.steps // 10)
    trainer = training.Trainer(
        model,
        optimizer=training.adamw(schedule),
        loader=train,
        loss=training.accumulate(loss, args.accumulate),
        directory=args.out,
        layout=layout,
        log_schedule=schedule,
        evaluation=training.Evaluation(held_out),
        checkpointer=checkpoint.Checkpointer(
            args.out / "checkpoints", every=max(args.steps // 4, 1), base=args.model if args.lora else None
        ),
        timeout=1800,  # ends a process that hangs, so that whoever started it can start it again
    )
    del model  # the trainer has a copy
    trainer.restore()
    if trainer.step == 0:
        trainer.log(f"before: {trainer.evaluate()['eval/nll']:.3f} nats per token of held-out text")
    trainer.log(f"after: {trainer.fit(args.steps)['eval/nll']:.3f} nats per token of held-out text")
    model = trainer.model
    if args.lora:
        print("\n".join(adapters.save(model, args.out / "adapter", base=args.base, overwrite=True)))
        model = adapters.merge(model)
    export(model, args)
    show_sample(model, tokenizer, args)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = functools.partial(parser.add_argument, metavar="N", type=int)
    add("model", metavar="MODEL", type=str, help="a Hugging Face directory, or a name on the hub")
    add("files", metavar="FILE", type=Path, nargs="*", help="text or .jsonl files, or folders of text files")
    add("--field", metavar="NAME", type=str, default="text", help="which field of a .jsonl line (%(default)s)")
    add("--out", metavar="DIR", type=Path, default=Path("runs/finetune"), help="where everything goes (%(default)s)")
    add("--steps", default=100, help="optimizer steps in all (%(default)s)")
    add("--batch", default=8, help="rows in a step (%(default)s)")
    add("--accumulate", default=1, help="microbatches that a step is cut into, for less memory (%(default)s)")
    add("--length", default=512, help="tokens in a row (%(default)s)")
    add("--learning-rate", metavar="X", type=float, help="its peak (2e-5; 2e-4 with --lora)")
    add(
        "--lora", metavar="RANK", default=0, help="train adapters of this rank only; 0 trains all weights (%(default)s)"
    )
    add("--prompt", metavar="TEXT", type=str, default="The ", help="what the sample continues (%(default)r)")
    args = parser.parse_args()
    args.learning_rate = args.learning_rate or (2e-4 if args.lora else 2e-5)
    args.base, args.model = args.model, weights.model_directory(args.model)
    return args


def loaders(tokenizer: Tokenizer, args) -> tuple[data.Loader, data.Loader]:
    """Packed rows for training, without end, and all rows of a twentieth of the documents for evaluation."""
    ids = special_ids(args.model)
    documents = data.files(args.files, field=args.field, document="paragraph") if args.files else data.python_text()
    tokens = [data.tokenize(part, tokenizer, **ids) for part in data.split(documents, validation=0.05)]
    train, held_out = tokens[0].shuffle(seed=0).repeat(), tokens[1]
    rows = lambda tokens: lambda part: data.pack(tokens[part], length=args.length)
    make = functools.partial(data.Loader, batch_size=args.batch)
    return make(rows(train)), make(rows(held_out), num_shards=1)


def special_ids(directory: Path) -> dict[str, int | None]:
    """What stands at the ends of a document; of several ends of text the first."""
    config = json.loads((directory / "config.json").read_text())
    config = config.get("text_config", {}) | config
    bos, eos = config.get("bos_token_id"), config.get("eos_token_id")
    return {"bos_id": bos, "eos_id": eos[0] if isinstance(eos, list) else eos}


def export(model, args) -> None:
    """Weights and config anew; the tokenizer with its chat template, and what prepares images, as they were."""
    target = args.out / "model"
    ids = special_ids(args.model)
    generation = {"bos_token_id": ids["bos_id"], "eos_token_id": ids["eos_id"]}
    maxlib.save_pretrained(model, target, generation=generation, overwrite=True)
    for name in KEPT:
        if (args.model / name).exists():
            shutil.copy(args.model / name, target)
    print(f"\nThe model is {target}; try it with: python examples/generate.py --raw --model {target} {args.prompt!r}")


def show_sample(model, tokenizer: Tokenizer, args) -> None:
    generator = inference.Generator(model, dtype=DTYPE)
    sampler = inference.Sampler(temperature=0.7, top_p=0.95)
    stop = inference.stop_tokens(args.model)
    print(f"\nA sample: {args.prompt}", end="")
    for piece in inference.stream_text(
        generator, tokenizer, args.prompt, max_new_tokens=60, sampler=sampler, stop=stop
    ):
        print(piece, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
