"""Tune a Hugging Face model on preference pairs (DPO), or adapters with --lora, and export it. Fork me.

The pairs are lines of JSON with `chosen` and `rejected`, each a list of messages (`role`, `content`) that ends with the
answer; `prompt` may hold the messages before. Run the same command again to resume.

With --adapter the policy starts from a PEFT adapter of MODEL, such as that of finetune.py --lora. That adapter is
frozen, and a new one is trained on top of it; the reference is the model with the old one. The result is one adapter.
Pairs are text; docs/guides/post-training.md says how to train on pairs with images.
"""

import argparse
import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

import maxlib
from maxlib import adapters, checkpoint, data, post_training, sharding, tokenization, training, weights

DTYPE = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16  # CPUs have no fast bfloat16
# The format of chats for a model without a template of its own, such as a base model.
PLAIN = (
    "{% for m in messages %}{{ m.role }}:\n{{ m.content }}{{ eos_token if m.role == 'assistant' }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:\n{% endif %}"
)
LOSSES = {
    "dpo": post_training.DPO,
    "ipo": functools.partial(post_training.DPO, loss_type="ipo"),
    "apo": functools.partial(post_training.DPO, loss_type="apo_zero"),
    "simpo": post_training.SimPO,
    "orpo": post_training.ORPO,
}


def main() -> None:
    args = arguments()
    layout = sharding.Layout(sharding.make_mesh(fsdp=-1), sharding.FSDP) if jax.device_count() > 1 else None
    read = functools.partial(maxlib.from_pretrained, args.model, layout=layout)
    loss = LOSSES[args.loss]()
    if args.beta is not None:
        loss = dataclasses.replace(loss, beta=args.beta)
    loader = pair_loader(args)
    model = read(dtype=jnp.float32)
    if args.lora:
        if args.adapter:
            model = adapters.freeze(adapters.load(model, args.adapter))
        model = adapters.add(model, adapters.LoRA(args.lora, 2 * args.lora), rngs=nnx.Rngs(0))
    if loss.needs_reference and args.lora:  # the model without the new adapter, which shares its arrays
        loss = dataclasses.replace(loss, reference=adapters.base_model)
    elif loss.needs_reference:  # the initial model, whose log-probabilities go into the batches
        loader = post_training.add_reference(loader, read(dtype=DTYPE), layout=layout, dtype=DTYPE)
    schedule = training.warmup_cosine(args.learning_rate, args.steps, warmup=max(args.steps // 10, 1))
    trainer = training.Trainer(
        model,
        optimizer=training.adamw(schedule),
        loader=loader,
        loss=loss,
        dtype=DTYPE,
        remat="full",
        microbatches=args.microbatches,
        directory=args.out,
        layout=layout,
        log_schedule=schedule,
        checkpointer=checkpoint.Checkpointer(
            args.out / "checkpoints", every=max(args.steps // 4, 1), base=args.model if args.lora else None
        ),
    )
    del model  # the trainer has a copy
    metrics = trainer.fit(args.steps)
    accuracy, margin = (float(metrics[f"rewards/{name}"]) for name in ("accuracies", "margins"))
    trainer.log(f"last step: pairs right {accuracy:.3f}, margin {margin:.3f}")
    model = trainer.model
    if args.lora:
        print("\n".join(adapters.save(model, args.out / "adapter", base=args.base, overwrite=True)))
        model = adapters.merge(model)
    target = args.out / "model"
    maxlib.save_pretrained(model, target, like=args.model, chat_template=args.template, overwrite=True)
    print(f"\nThe model is {target}; try it with: maxlib chat {target}")


def pair_loader(args: argparse.Namespace) -> data.Loader:
    """Returns an endless loader of chosen and rejected answers; unusable pairs are counted and skipped."""
    records = data.chats(args.pairs, field="chosen")
    tokenizer = tokenization.load_tokenizer(args.model)
    bad = data.SkipBadRecords(limit=len(records) // 10)
    pairs = bad.guard(data.pairs(records, tokenizer, args.template), name="pairs")
    rows = data.pad(pairs, length=args.length, overlong="drop").shuffle(seed=0).repeat()
    return data.Loader(lambda part: rows[part], batch_size=args.batch_size, bad_records=bad)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = functools.partial(parser.add_argument, metavar="N", type=int)
    add("model", metavar="MODEL", type=str, help="a Hugging Face directory, or a name on the hub")
    add("pairs", metavar="FILE", type=Path, help="pairs, as lines of JSON")
    add("--out", metavar="DIR", type=Path, default=Path("runs/prefer"), help="output directory (%(default)s)")
    add(
        "--loss",
        metavar="NAME",
        type=str,
        choices=list(LOSSES),
        default="dpo",
        help=f"one of {', '.join(LOSSES)} (%(default)s)",
    )
    add(
        "--beta",
        metavar="X",
        type=float,
        help="the loss's beta, the strength of the reference (default: that of the loss)",
    )
    add("--steps", default=100, help="number of optimizer steps (%(default)s)")
    add("--batch-size", default=8, help="pairs per step (%(default)s)")
    add("--microbatches", default=1, help="microbatches per step, to use less memory (%(default)s)")
    add("--length", default=512, help="tokens of prompt and answer; longer pairs are skipped (%(default)s)")
    add("--learning-rate", metavar="X", type=float, help="peak learning rate (1e-6; 1e-5 with --lora)")
    add("--lora", metavar="RANK", default=0, help="train an adapter of this rank; 0 trains all weights (%(default)s)")
    add("--adapter", metavar="DIR", type=Path, help="a PEFT adapter to start from, with --lora")
    args = parser.parse_args()
    if args.adapter and not args.lora:
        parser.error("--adapter needs --lora RANK, the rank of the new adapter")
    args.learning_rate = args.learning_rate or (1e-5 if args.lora else 1e-6)
    args.base, args.model = args.model, weights.model_directory(args.model)
    args.template = tokenization.ChatTemplate.from_directory(args.model, default=PLAIN)
    return args


if __name__ == "__main__":
    main()
