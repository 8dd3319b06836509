"""Training runs that show learning: the score of each method on a short task, compared with TRL.

    python -m tests.benchmarks.learning [--seeds 0 1 2] [--runs sft dpo ...] [--trl] [--check] [--json X] [--draw X]

The task is to sort 3 to 7 digits; the model is a small Llama (`CONFIG`), from random weights. "exact" is the share of
256 fresh prompts whose greedy answer is right to its end. Seconds are those of whole runs, from making the trainer and
its data on, compilation included; beside them stand those of the processor, which other programs do not
lengthen, and the median time of a step, without. Compiled programs are kept on
disk, so that only the first seed waits for the compiler. With --trl its trainers start from the same weights, right
after ours, with as many rows and steps, on the same cores. With --json what is there already is not run again.
"""

import argparse
import dataclasses
import functools
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import maxlib
from maxlib import adapters, inference, nn, ops, post_training, training, weights
from maxlib.models import llama
from tests.post_training import sorting

CONFIG = llama.Config(
    vocab=sorting.VOCAB,
    num_layers=4,
    dim=128,
    mlp_dim=384,
    num_heads=4,
    num_kv_heads=4,
    head_dim=32,
    rope=ops.Rope(32, max_length=64),
)
STUDENT = dataclasses.replace(
    CONFIG,
    num_layers=2,
    dim=64,
    mlp_dim=192,
    num_heads=4,
    num_kv_heads=4,
    head_dim=16,
    rope=ops.Rope(16, max_length=64),
)
ROWS, PROMPTS, GROUP = 64, 16, 8  # rows of a batch; prompts of a GRPO step, and completions of each
STEPS = {"sft": 500, "lora": 200, "dpo": 60, "grpo": 60, "ppo": 60, "distillation": 1000}
RATES = {"sft": 1e-3, "lora": 3e-3, "dpo": 5e-5, "grpo": 1e-4, "ppo": 1e-4, "distillation": 1e-3}
EPOCHS = 4  # of PPO, on the completions of a step
LORA = adapters.LoRA(rank=8, alpha=16)
SAMPLER = inference.Sampler(temperature=1.0)
# What each run must reach: the least ("exact >=") or the most of a figure.
THRESHOLDS = {
    "sft": {"exact >=": 0.98},
    "lora": {"exact >=": 0.90, "base changed <=": 0},
    "dpo": {"pairs right >=": 0.98, "up >=": 0.60, "down <=": 0.02},
    "grpo": {"reward >=": 0.85, "exact >=": 0.93},
    "ppo": {"reward >=": 0.85, "exact >=": 0.93},
    "distillation": {"divergence <=": 0.06, "of the start <=": 1 / 8, "exact >=": 0.85},
}
CURVES = {"sft": "nll", "lora": "nll", "dpo": "rewards/accuracies", "grpo": "reward", "ppo": "reward"}
CURVES["distillation"] = "divergence"


class Curve(list):
    """A writer that keeps everything, and the time of each step."""

    def __init__(self):
        super().__init__()
        self.times = []

    def resume(self, step):
        pass

    def write(self, step, values):
        self.append({name: float(value) for name, value in values.items()})
        self.times.append(time.perf_counter())

    def close(self):
        pass


Seconds = tuple[float, float]  # of the wall clock, and of the processor, which other programs do not lengthen


def clocks() -> Seconds:
    return time.perf_counter(), time.process_time()


def since(start: Seconds) -> Seconds:
    wall, processor = (now - then for now, then in zip(clocks(), start, strict=True))
    return wall, processor


def optimizer(run: str) -> optax.GradientTransformation:
    """AdamW without decay and with gradients clipped to 1, as TRL's defaults: linear to zero, but for SFT."""
    schedule = optax.cosine_decay_schedule if run in ("sft", "lora", "distillation") else polynomial
    return training.adamw(schedule(RATES[run], STEPS[run]), b2=0.999, weight_decay=0.0)


def polynomial(rate: float, steps: int) -> optax.Schedule:
    return optax.linear_schedule(rate, 0.0, steps)


def trained(run: str, model: Any, loader: Any, loss: Any, **options: Any) -> tuple[Any, Curve, Seconds]:
    """The trained model, its metrics by step, and seconds of wall clock and of the processor, with compilation."""
    curve, start = Curve(), clocks()
    trainer = training.Trainer(model, optimizer(run), loader, loss=loss, dtype=jnp.float32, **options)
    trainer.writers[:] = [curve]
    loader.trainer = trainer
    trainer.fit(STEPS[run])
    return trainer.model, curve, since(start)


def answers(generator: inference.Generator, prompts: list, sampler: Any = inference.GREEDY, key: Any = None) -> list:
    """Completions with the end token, where they end."""
    options = {"sampler": sampler, "stop_token_ids": [sorting.END], "key": key, "capacity": 16}
    return generator.generate(prompts, max_new_tokens=sorting.NEW, **options)


def exact(model: Any, seed: int) -> dict[str, float]:
    """The shares of fresh prompts that are sorted upwards and downwards."""
    lists = sorting.lists(np.random.default_rng(10**6 + seed), 256)
    got = answers(inference.Generator(model, dtype=jnp.float32), [sorting.prompt(x) for x in lists])
    share = lambda down: float(np.mean([text == sorting.answer(x, down) for text, x in zip(got, lists, strict=True)]))
    return {"up": share(False), "down": share(True)}


def supervised(run: str, model: Any, seed: int, orders: tuple[bool, ...], **options: Any) -> tuple[Any, Curve, Seconds]:
    make = lambda number: (sorting.rows(*sorting.supervised((seed + 1) * 10**4 + number, ROWS, orders)), {})
    return trained(run, model, post_training.Rollouts(make), training.NextToken(), **options)


def sft(model: Any, seed: int) -> tuple[Any, dict, Curve, Seconds]:
    new, curve, seconds = supervised("sft", model, seed, (False,))
    return new, {"exact": exact(new, seed)["up"]}, curve, seconds


def lora(model: Any, seed: int) -> tuple[Any, dict, Curve, Seconds]:
    """Trains adapters on the other order."""
    adapted = adapters.add(model, LORA, rngs=nnx.Rngs(seed))
    new, curve, seconds = supervised("lora", adapted, seed + 100, (True,), filter=adapters.trainable)
    before, after = (jax.device_get(nn.variables(m)) for m in (model, adapters.base_model(new)))
    changed = sum(bool((before[path][...] != after[path][...]).any()) for path in before)
    return new, {"exact": exact(new, seed)["down"], "base changed": changed}, curve, seconds


def dpo(model: Any, seed: int) -> tuple[Any, dict, Curve, Seconds]:
    def make(number: int) -> tuple[dict[str, Any], dict[str, float]]:
        questions, chosen, rejected = sorting.pairs((seed + 200) * 10**4 + number, ROWS)
        return {"chosen": sorting.rows(questions, chosen), "rejected": sorting.rows(questions, rejected)}, {}

    loader = post_training.add_reference(post_training.Rollouts(make), model, dtype=jnp.float32)
    new, curve, seconds = trained("dpo", model, loader, post_training.DPO(0.1))
    right = statistics.fmean(values["rewards/accuracies"] for values in curve[-5:])
    return new, {"pairs right": right, **exact(new, seed)}, curve, seconds


def sampled(
    state: training.TrainState,
    generator: inference.Generator,
    seed: int,
    number: int,
    *,
    prompts: int,
    num_samples: int,
) -> tuple[list, list]:
    """Prompts, each `num_samples` times, and completions by the newest weights."""
    generator.update({path.removeprefix("trained."): value for path, value in state.trainable.items()})
    lists = sorting.lists(np.random.default_rng(seed * 10**4 + number), prompts)
    rows = [sorting.prompt(x) for x in lists for _ in range(num_samples)]
    return rows, answers(generator, rows, SAMPLER, jax.random.key(seed * 10**4 + number))


def grpo(model: Any, seed: int) -> tuple[Any, dict, Curve, Seconds]:
    generator = inference.Generator(model, dtype=jnp.float32)

    def make(number: int) -> tuple[dict[str, Any], dict[str, float]]:
        prompts, texts = sampled(
            loader.trainer.state, generator, seed + 300, number, prompts=PROMPTS, num_samples=GROUP
        )
        rewards = np.array([sorting.reward(*both) for both in zip(prompts, texts, strict=True)]).reshape(-1, GROUP)
        advantages = post_training.group_advantages(rewards)
        batch = post_training.completion_batch(prompts, texts, advantages, length=sorting.LENGTH, sampler=SAMPLER)
        return batch, post_training.reward_metrics(rewards)

    loader = post_training.Rollouts(make)
    loss = post_training.DAPO(temperature=SAMPLER.temperature)
    new, curve, seconds = trained("grpo", model, loader, loss)
    reward = statistics.fmean(values["reward"] for values in curve[-5:])
    return new, {"reward": reward, "exact": exact(new, seed)["up"]}, curve, seconds


def critic_of(model: Any, seed: int) -> Any:
    return nn.with_head(model, nn.ScoreHead(CONFIG.dim, 1, rngs=nnx.Rngs(seed + 2)))


def ppo(model: Any, seed: int) -> tuple[Any, dict, Curve, Seconds]:
    """PPO with a critic that starts from the policy's weights; its settings are the defaults of TRL's trainer."""

    def schedule(step: Any) -> Any:
        return polynomial(RATES["ppo"], STEPS["ppo"])(step // EPOCHS)

    def made(loss: training.Loss, start: Any) -> tuple[Any, Any]:
        adamw = training.adamw(schedule, b2=0.999, weight_decay=0.0, clip=None)
        step = training.make_train_step(loss, adamw, dtype=jnp.float32)
        return training.make_state(jax.tree.map(jnp.copy, start), adamw), training.jit_step(step)

    curve, start = Curve(), clocks()
    policy, policy_step = made(post_training.PPO(), model)
    critic, critic_step = made(post_training.ValueLoss(), critic_of(model, seed))
    log_probs = jax.jit(functools.partial(post_training.log_probs, dtype=jnp.float32))
    token_scores = jax.jit(functools.partial(post_training.token_scores, dtype=jnp.float32))
    generator = inference.Generator(model, dtype=jnp.float32)
    for number in range(STEPS["ppo"]):
        prompts, texts = sampled(policy, generator, seed + 600, number, prompts=PROMPTS * GROUP, num_samples=1)
        scores = np.array([sorting.reward(*both) for both in zip(prompts, texts, strict=True)])
        rows = sorting.rows(prompts, texts)
        mask = rows["targets"] >= 0
        old, reference = (np.asarray(log_probs(m, rows).log_prob) for m in (policy.model, model))
        values = np.asarray(token_scores(critic.model, rows))[..., 0]
        rewards = post_training.ppo.token_rewards(scores, mask, old=old, reference=reference, beta=0.05)
        advantages, returns = post_training.ppo.gae(rewards, values, mask, gamma=1.0, lam=0.95)
        white = np.float32(post_training.ppo.whiten(advantages, mask))
        for _ in range(EPOCHS):
            policy, metrics = policy_step(policy, rows | {"advantages": white, "old_log_probs": old})
            critic, value = critic_step(critic, rows | {"returns": np.float32(returns), "old_values": values})
        curve.write(number, metrics | {"value_error": value["value_error"], "reward": scores.mean()})
    seconds = since(start)
    reward = statistics.fmean(values["reward"] for values in curve[-5:])
    return policy.model, {"reward": reward, "exact": exact(policy.model, seed)["up"]}, curve, seconds


def student_of(seed: int) -> Any:
    return jax.jit(lambda: llama.Llama(STUDENT, rngs=nnx.Rngs(seed + 1)))()


def distillation(teacher: Any, seed: int) -> tuple[Any, dict, Curve, Seconds]:
    """On-policy, by the reverse divergence, into a smaller model whose random weights write nothing useful at first."""
    student = student_of(seed)
    generator = inference.Generator(student, dtype=jnp.float32)

    def make(number: int) -> tuple[dict[str, Any], dict[str, float]]:
        texts = sampled(loader.trainer.state, generator, seed + 400, number, prompts=ROWS, num_samples=1)
        return sorting.rows(*texts), {}

    loader = post_training.Rollouts(make)
    loss = post_training.Distillation(beta=1.0)
    both = post_training.WithFrozen(student, teacher)
    options = {"filter": training.trainable_only("trained.*")}
    new, curve, seconds = trained("distillation", both, loader, loss, **options)
    last = statistics.fmean(values["divergence"] for values in curve[-5:])
    divergences = {"divergence": last, "of the start": last / curve[0]["divergence"]}
    return new.trained, divergences | {"exact": exact(new.trained, seed)["up"]}, curve, seconds


RUNS = {"sft": sft, "lora": lora, "dpo": dpo, "grpo": grpo, "ppo": ppo, "distillation": distillation}


def one_seed(seed: int, runs: list[str], trl: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the runs of a seed. Adapters and distillation start from the SFT model, DPO, GRPO and PPO from a model of
    two orders.
    """
    start = jax.jit(lambda: llama.Llama(CONFIG, rngs=nnx.Rngs(seed)))()
    sorter, *of_sft = sft(start, seed) if {"sft", "lora", "distillation"} & {*runs} else [None]
    either = None
    if {"dpo", "grpo", "ppo"} & {*runs}:
        either = supervised("sft", start, seed + 500, (False, True))[0]
        print(f"seed {seed}: the model that sorts up or down by chance: {exact(either, seed)}", flush=True)
    for run in runs:
        begin = {"sft": start, "dpo": either, "grpo": either, "ppo": either}.get(run, sorter)
        figures, curve, seconds = of_sft if run == "sft" else RUNS[run](begin, seed)[1:]
        values = [round(step[CURVES[run]], 5) for step in curve]
        step = statistics.median(np.diff(curve.times).tolist())
        out = {"figures": figures, "seconds": seconds[0], "processor": seconds[1], "step": step, "curve": values}
        if trl:
            out["trl"] = beside(run, begin, seed)
        print(f"seed {seed}: {run}: " + json.dumps({k: v for k, v in out.items() if k != "curve"}), flush=True)
        yield run, out


def beside(run: str, model: Any, seed: int) -> dict[str, Any]:
    """Seconds and figures of TRL, from the same weights."""
    from tests.post_training import learning_trl

    with tempfile.TemporaryDirectory() as directory:
        weights.save_pretrained(model, Path(directory) / "model")
        if run == "distillation":
            weights.save_pretrained(student_of(seed), Path(directory) / "student")
        if run == "ppo":
            weights.save_pretrained(
                critic_of(model, seed), Path(directory) / "critic", generation={"pad_token_id": sorting.PAD}
            )
        sizes = {"rows": PROMPTS * GROUP if run in ("grpo", "ppo") else ROWS, "group": GROUP}
        return learning_trl.run(run, Path(directory), seed, steps=STEPS[run], rate=RATES[run], **sizes)


def missed(runs: dict[str, dict[str, Any]]) -> list[str]:
    """Returns the runs that miss their threshold."""
    out = []
    for run, figures in runs.items():
        for what, bound in THRESHOLDS[run].items():
            name, sign = what.rsplit(" ", 1)
            value = figures["figures"][name]
            if not (value >= bound if sign == ">=" else value <= bound):
                out.append(f"{run}: {what} {bound:g}, got {value:g}")
    return out


def summary(seeds: list[dict], runs: list[str]) -> str:
    """A table for the docs: the worst of each figure over seeds, and medians of times."""
    lines = ["| run | must reach | worst of the seeds | s (of the processor), a step | TRL |", "|---|---|---|---|---|"]
    for run in runs:
        worst = {}
        for what in THRESHOLDS[run]:
            name, sign = what.rsplit(" ", 1)
            worst[name] = (min if sign == ">=" else max)(seed[run]["figures"][name] for seed in seeds)
        must = ", ".join(f"{what} {bound:g}" for what, bound in THRESHOLDS[run].items())
        got = ", ".join(f"{name} {value:.3g}" for name, value in worst.items())
        theirs = [seed[run]["trl"] for seed in seeds if "trl" in seed[run]]
        times = [timed([seed[run] for seed in seeds]), timed(theirs) if theirs else ""]
        lines.append(f"| {run} | {must} | {got} | {times[0]} | {times[1]} |")
    return "\n".join(lines)


def timed(runs: list[dict]) -> str:
    """Medians of the seconds of whole runs, those of the processor, and of a step."""
    middle = lambda name: statistics.median(run[name] for run in runs)
    return f"{middle('seconds'):.0f} s ({middle('processor'):.0f} s), {1e3 * middle('step'):.0f} ms"


def draw(seeds: list[dict], runs: list[str], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(runs), figsize=(3.2 * len(runs), 2.6), layout="constrained", squeeze=False)
    for axis, run in zip(axes[0], runs, strict=True):
        for number, seed in enumerate(seeds):
            values = np.array(seed[run]["curve"])
            width = max(1, len(values) // 50)  # a mean over a few steps, as single ones are noisy
            smooth = np.convolve(values, np.ones(width) / width, mode="valid")
            axis.plot(np.arange(len(smooth)) + width, smooth, color=("#4477aa", "#ee6677", "#228833")[number % 3], lw=1)
        axis.set(title=run, xlabel="step", ylabel=CURVES[run].replace("rewards/accuracies", "pairs right"))
        if CURVES[run] in ("nll", "divergence"):
            axis.set_yscale("log")
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--trl", action="store_true", help="run TRL's trainers beside ours (needs trl and peft)")
    parser.add_argument("--check", action="store_true", help="fail where a threshold is missed")
    parser.add_argument("--json", type=Path, help="figures and curves; seeds that are there already are not run again")
    parser.add_argument("--draw", type=Path, help="draw the curves here")
    args = parser.parse_args()
    maxlib.keep_freed_memory()  # for ours and for TRL's, as both train here
    programs = tempfile.TemporaryDirectory()
    jax.config.update("jax_compilation_cache_dir", programs.name)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    results: dict[str, Any] = {}
    if args.json and args.json.exists():
        results = json.loads(args.json.read_text())["seeds"]
    for seed in args.seeds:
        left = [run for run in args.runs if run not in results.get(str(seed), ())]
        for run, result in one_seed(seed, left, args.trl) if left else ():
            results.setdefault(str(seed), {})[run] = result
            if args.json:
                machine = {"processor": platform.machine(), "jax": jax.__version__}
                args.json.write_text(json.dumps({"machine": machine, "seeds": results}) + "\n")
    seeds = [results[str(seed)] for seed in args.seeds]
    print(summary(seeds, args.runs))
    if args.draw:
        draw(seeds, args.runs, args.draw)
    lost = [f"seed {n}: {line}" for n, seed in zip(args.seeds, seeds, strict=True) for line in missed(seed)]
    print(*lost, sep="\n")
    if args.check and lost:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
