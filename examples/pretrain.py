"""Train a tokenizer and a small Llama on real text, and export it for transformers. Fork me.

The default text is Python's own documentation (help topics and docstrings); pass files or folders to use yours.
Run the same command again to resume. Ctrl-C saves first. examples/launch/ runs it on several machines as it is.
"""

import argparse
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tokenizers import Tokenizer

import maxlib
from maxlib import (
    checkpoint,
    data,
    distributed,
    inference,
    observability,
    ops,
    quantization,
    sharding,
    tokenization,
    training,
)
from maxlib.models import llama

BOS, EOS, PROMPT = "<bos>", "<eos>", "The"


def main() -> None:
    args = arguments()
    distributed.initialize(exit_on_error=True)  # an error in one process ends all processes at once
    args.dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16  # CPUs have no fast bfloat16
    args.out.mkdir(parents=True, exist_ok=True)
    with distributed.main_process_first("tokens"):
        tokenizer, train, held_out = load_tokens(args)
    ids = {"bos_id": tokenizer.token_to_id(BOS), "eos_id": tokenizer.token_to_id(EOS)}
    loader, eval_loader = loaders(train, held_out, args)
    schedule = training.warmup_cosine(args.learning_rate, args.steps, warmup=args.steps // 10)
    plain = lambda: llama.Llama(config(tokenizer.get_vocab_size(), args), rngs=nnx.Rngs(0))
    build = (lambda: quantization.for_training(plain(), args.quantize)) if args.quantize else plain
    trainer = training.Trainer(
        build,
        optimizer=training.adamw(schedule),
        loader=loader,
        dtype=args.dtype,
        directory=args.out,
        layout=args.layout.on(jax.devices()) if jax.device_count() > 1 else None,
        log_schedule=schedule,
        evaluation=training.Evaluation(eval_loader, every=max(args.steps // 4, 1)),
        checkpointer=checkpoint.Checkpointer(args.out / "checkpoints", every=max(args.steps // 10, 1)),
        timeout=1800,  # ends a process that hangs, so that whoever started it can start it again
    )
    if args.quantize:
        trainer.log(quantization.report(trainer.state.model).summary)
    loss, entropy = trainer.fit(args.steps)["eval/nll"], unigram(held_out)
    trainer.log(f"\nvalidation loss {loss:.3f} nats per token; unigram entropy of the same tokens {entropy:.3f}")
    tokens = {"bos_token_id": ids["bos_id"], "eos_token_id": ids["eos_id"]}
    maxlib.save_pretrained(trainer.model, args.out / "model", generation=tokens, overwrite=True)  # all processes
    if jax.process_index() == 0:
        finish(tokenizer, entropy, args)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = functools.partial(parser.add_argument, metavar="N", type=int)
    add("files", metavar="FILE", type=Path, nargs="*", help="text (by paragraphs), .jsonl (field 'text') or folders")
    add("--out", metavar="DIR", type=Path, default=Path("runs/pretrain"), help="output directory (%(default)s)")
    add("--steps", default=360, help="number of optimizer steps (%(default)s)")
    add("--batch-size", default=4, help="rows per step (%(default)s)")
    add("--length", default=256, help="tokens per row (%(default)s)")
    add("--vocab", default=4096, help="vocabulary size of the trained tokenizer (%(default)s)")
    add("--layers", default=4, help="layers of the model (%(default)s)")
    add("--dim", default=448, help="width of the model, a multiple of 64 (%(default)s)")
    add("--learning-rate", metavar="X", type=float, default=3e-3, help="peak learning rate (%(default)s)")
    add(
        "--mesh",
        metavar="DEGREES",
        type=str,
        default="fsdp=-1",
        help="degrees of the mesh, such as fsdp=-1,tensor=2 (%(default)s)",
    )
    add("--dcn", metavar="DEGREES", type=str, default="", help="degrees across slices or hosts, such as data=-1")
    add(
        "--strategy",
        metavar="NAME",
        type=str,
        default="fsdp",
        help="sharding rules, such as fsdp_tp or fsdp+cp_ring (%(default)s)",
    )
    add("--quantize", metavar="FORMAT", type=str, choices=list(quantization.TRAINING), help="train in int8 or fp8")
    args = parser.parse_args()
    if args.dim < 64 or args.dim % 64:
        parser.error(f"--dim must be a multiple of 64, the width of a head; got {args.dim}")
    try:
        degrees = {**sharding.parse_degrees(args.mesh), "dcn": sharding.parse_degrees(args.dcn)}
        args.layout = sharding.Layout(degrees, sharding.preset(args.strategy))
    except ValueError as error:
        parser.error(str(error))
    return args


def load_tokens(args: argparse.Namespace) -> tuple:
    """Returns the tokenizer and the tokens of both parts of the text, which the first run writes."""
    text, directory = " ".join(map(str, args.files)) or "Python's documentation", args.out / "tokens"
    text += f" in a vocabulary of {args.vocab}"
    if not (directory / "held_out" / "manifest.json").exists():
        write_tokens(text, directory, args)
    if (written := data.read_manifest(directory / "held_out")["description"]) != text:
        raise SystemExit(f"{directory} has tokens of {written}, not of {text}: choose another --out")
    train, held_out = (data.read_tokens(directory / part) for part in ("train", "held_out"))
    return tokenization.load_tokenizer(args.out / "tokenizer"), train, held_out


def write_tokens(text: str, directory: Path, args: argparse.Namespace) -> None:
    documents = data.files(args.files, document="paragraph") if args.files else data.python_docs()
    train, held_out = data.split(documents, validation=0.05)
    texts = (document["text"] for document in train)
    tokenizer = tokenization.train_bpe(texts, vocab_size=args.vocab, special_tokens=(BOS, EOS))
    tokenization.save_tokenizer(tokenizer, args.out / "tokenizer", bos_token=BOS, eos_token=EOS)
    write = functools.partial(
        data.write_tokens,
        tokenizer=tokenizer,
        bos_id=tokenizer.token_to_id(BOS),
        eos_id=tokenizer.token_to_id(EOS),
        description=text,
    )
    write(train, directory / "train")
    write(held_out, directory / "held_out")


def loaders(train, held_out, args) -> tuple[data.Loader, data.Loader]:
    rows = lambda tokens: lambda part: data.pack(tokens[part], length=args.length)
    make = functools.partial(data.Loader, batch_size=args.batch_size)
    return make(rows(train.shuffle(seed=0).repeat())), make(rows(held_out), num_shards=1)


def config(vocab: int, args) -> llama.Config:
    heads, rope = args.dim // 64, ops.Rope(64, max_length=max(args.length, 1024))
    size = {"num_layers": args.layers, "dim": args.dim, "mlp_dim": args.dim * 8 // 3, "head_dim": 64}
    return llama.Config(vocab=vocab, num_heads=heads, num_kv_heads=heads, rope=rope, tied=True, **size)


def unigram(documents) -> float:
    """Returns the unigram entropy of the targets: the loss of a model that knows only token frequencies."""
    targets = [document["tokens"][1:] for i in range(len(documents)) if (document := documents[i])]
    share = np.bincount(np.concatenate(targets))
    share = share[share > 0] / share.sum()
    return float(-np.sum(share * np.log(share)))


def finish(tokenizer: Tokenizer, entropy: float, args) -> None:
    export, sample = args.out / "model", []
    tokenization.save_tokenizer(tokenizer, export, bos_token=BOS, eos_token=EOS)
    ends = [tokenizer.get_vocab()[EOS]]
    generate = functools.partial(inference.stream_text, max_new_tokens=80, stop_token_ids=ends)
    print(f"\nA sample: {PROMPT}", end="")
    generator = inference.Generator(maxlib.from_pretrained(export), dtype=args.dtype)
    sampler = inference.Sampler(temperature=0.8, top_p=0.95)
    for piece in generate(generator, tokenizer, PROMPT, sampler=sampler):
        print(piece, end="", flush=True)
        sample.append(piece)
    plot_loss(args.out, entropy)
    observability.write_config(args.out, **vars(args))
    observability.add_sample(args.out, args.steps, "".join(sample), prompt=PROMPT)
    print(f"\n\nThe loss curve is {args.out / 'loss.png'}; open it with any viewer.")
    print(f"The report on the run is {observability.report(args.out)}; open it with any browser.")
    print(f"The model is {export}; open it with transformers.AutoModelForCausalLM.from_pretrained({str(export)!r}).")


def plot_loss(directory: Path, entropy: float) -> None:
    import matplotlib.pyplot as plt  # here, because a restart need not wait for it

    rows = observability.read_jsonl(directory / "metrics.jsonl")
    figure, axes = plt.subplots(layout="constrained")
    for name, label, style in (("nll", "training", "-"), ("eval/nll", "validation", "o-")):
        points = [(row["step"], row[name]) for row in rows if name in row]
        axes.plot(*zip(*points, strict=True), style, label=label)
    axes.axhline(entropy, color="grey", linestyle="--", label=f"unigram entropy {entropy:.2f}")
    axes.set(xlabel="step", ylabel="nats per token")
    axes.legend()
    figure.savefig(directory / "loss.png", dpi=120)


if __name__ == "__main__":
    main()
