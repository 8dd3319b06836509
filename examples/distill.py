"""Distill a Hugging Face model into one with fewer layers, on your text, and export it. Fork me.

The student has the teacher's configuration except for the number of layers, and random weights. The default text is
what every Python carries. Run the same command again to resume.
"""

import argparse
import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

import maxlib
from maxlib import checkpoint, data, post_training, sharding, tokenization, training, weights

DTYPE = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16  # CPUs have no fast bfloat16


def main() -> None:
    args = arguments()
    layout = sharding.Layout(sharding.make_mesh(fsdp=-1), sharding.FSDP) if jax.device_count() > 1 else None
    teacher = maxlib.from_pretrained(args.model, dtype=DTYPE, layout=layout)
    cfg = dataclasses.replace(teacher.cfg, num_layers=args.layers)
    make = lambda: type(teacher)(cfg, rngs=nnx.Rngs(0))
    student = jax.jit(make)() if layout is None else sharding.init_sharded(make, layout)
    schedule = training.warmup_cosine(args.learning_rate, args.steps, warmup=max(args.steps // 10, 1))
    train, held_out = loaders(args)
    trainer = training.Trainer(
        post_training.WithFrozen(student, teacher),
        optimizer=training.adamw(schedule),
        loader=train,
        loss=post_training.Distillation(args.beta, args.temperature, args.hard),
        dtype=DTYPE,
        remat="full",
        directory=args.out,
        layout=layout,
        log_schedule=schedule,
        evaluation=training.Evaluation(held_out),
        checkpointer=checkpoint.Checkpointer(args.out / "checkpoints", every=max(args.steps // 4, 1)),
    )
    trainer.restore()
    if trainer.step == 0:
        trainer.log(f"before: {trainer.evaluate()['eval/divergence']:.3f} nats from the teacher")
    trainer.log(f"after: {trainer.fit(args.steps)['eval/divergence']:.3f} nats from the teacher, on held-out text")
    maxlib.save_pretrained(trainer.model.trained, args.out / "model", like=args.model, overwrite=True)


def loaders(args: argparse.Namespace) -> tuple[data.Loader, data.Loader]:
    """Returns an endless loader of packed rows for training, and the rows of 5% of the documents for evaluation."""
    tokenizer = tokenization.load_tokenizer(args.model)
    documents = data.files(args.files, field="text", document="paragraph") if args.files else data.python_docs()
    train, held_out = (data.tokenize(part, tokenizer) for part in data.split(documents, validation=0.05))
    rows = lambda tokens: lambda part: data.pack(tokens[part], length=args.length)
    make = functools.partial(data.Loader, batch_size=args.batch_size)
    return make(rows(train.shuffle(seed=0).repeat())), make(rows(held_out), num_shards=1)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = functools.partial(parser.add_argument, metavar="N", type=int)
    add("model", metavar="TEACHER", type=str, help="a Hugging Face directory, or a name on the hub; the teacher")
    add("files", metavar="FILE", type=Path, nargs="*", help="text or .jsonl files, or folders of text files")
    add("--out", metavar="DIR", type=Path, default=Path("runs/distill"), help="output directory (%(default)s)")
    add("--layers", default=4, help="layers of the student (%(default)s)")
    add("--beta", metavar="X", type=float, default=0.0, help="0: forward divergence, 1: reverse (%(default)s)")
    add("--temperature", metavar="X", type=float, default=1.0, help="softmax temperature of both models (%(default)s)")
    add("--hard", metavar="X", type=float, default=0.0, help="weight of the cross-entropy on the text (%(default)s)")
    add("--steps", default=200, help="number of optimizer steps (%(default)s)")
    add("--batch-size", default=8, help="rows per step (%(default)s)")
    add("--length", default=512, help="tokens per row (%(default)s)")
    add("--learning-rate", metavar="X", type=float, default=1e-3, help="peak learning rate (%(default)s)")
    args = parser.parse_args()
    args.model = weights.model_directory(args.model)
    return args


if __name__ == "__main__":
    main()
