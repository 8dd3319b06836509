"""Trains a published size from scratch on all devices, such as a TPU slice. Copy this file and change it.

Start the same program in every process of the run. Checkpoints may be in a bucket. To resume after a crash or a
preemption, start it again with the same options: it finds its newest checkpoint.
"""

import argparse
import functools
from pathlib import Path

import jax
from flax import nnx

from maxlib import checkpoint, data, distributed, sharding, training, weights


def main() -> None:
    args = arguments()
    distributed.initialize(exit_on_error=True)  # finds TPU slices, SLURM, JobSets; an error in one process ends all
    tokens = data.read_tokens(args.tokens).shuffle(seed=0).repeat()
    loader = data.Loader(
        lambda part: data.pack(tokens[part], length=args.length),
        batch_size=args.batch_size,  # of all devices: the same on any number of them, so that a run can resume on fewer
    )
    trainer = training.Trainer(
        functools.partial(build, args.preset),
        optimizer=training.adamw(training.warmup_cosine(args.learning_rate, args.steps, warmup=args.steps // 20)),
        loader=loader,
        remat=args.remat,
        layout=layout(args).on(jax.devices()),
        directory=args.out,
        checkpointer=checkpoint.Checkpointer(args.checkpoints, every=args.save_every, keep=3),
        timeout=1800,  # ends a process that hangs, so that whoever started it can start it again
    )
    trainer.fit(args.steps)


def layout(args: argparse.Namespace) -> sharding.Layout:
    degrees = {**sharding.parse_degrees(args.mesh), "dcn": sharding.parse_degrees(args.dcn)}
    return sharding.Layout(degrees, sharding.preset(args.strategy))


def build(preset: str) -> nnx.Module:
    cfg = weights.presets()[preset]
    family = next(family for family in weights.families() if preset in family.presets)
    return family.model(cfg, rngs=nnx.Rngs(0))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("preset", help="a published size, such as llama3.1-8b; `maxlib models` lists them")
    add("--tokens", type=Path, required=True, help="a directory of `python -m maxlib.data tokenize`, seen by all hosts")
    add("--checkpoints", required=True, help="a directory that all hosts see, or gs://bucket/run, s3://bucket/run")
    add("--out", type=Path, default=Path("runs/preset"), help="metrics, on the first host (%(default)s)")
    add("--steps", type=int, default=1000, help="number of optimizer steps (%(default)s)")
    add("--length", type=int, default=4096, help="tokens per row (%(default)s)")
    add("--batch-size", type=int, default=64, help="rows of a step, over all devices; fixed for a run (%(default)s)")
    add("--learning-rate", type=float, default=3e-4, help="peak learning rate (%(default)s)")
    add("--save-every", type=int, default=100, help="steps between checkpoints (%(default)s)")
    add("--mesh", default="fsdp=-1", help="such as fsdp=-1,tensor=4 (%(default)s)")
    add("--dcn", default="", help="degrees across slices, such as data=2")
    add("--strategy", default="fsdp", help="such as fsdp_tp_sp (%(default)s)")
    add("--remat", default="full", help="what is computed again, such as full, qkv, dots (%(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
