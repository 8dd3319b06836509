"""Train a small model from rewards only (GRPO): it writes digits, and ascending ones are rewarded. Fork me.

The model starts from random weights and learns within a minute on a CPU. To use another task, change `reward` and the
prompts; for a model of your own replace `build` by `maxlib.from_pretrained`.
"""

import argparse
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxlib import checkpoint, inference, ops, post_training, training
from maxlib.models import llama

VOCAB, PROMPT = 16, 2
SAMPLER = inference.Sampler(temperature=1.0)


def main() -> None:
    args = arguments()
    model = build()
    sampling = Sampling(model, args)
    sampling.trainer = trainer = training.Trainer(
        model,
        optimizer=training.adamw(args.learning_rate),
        loader=post_training.Rollouts(sampling.batch),
        loss=post_training.DAPO(temperature=SAMPLER.temperature),
        dtype=jnp.float32,
        directory=args.out,
        checkpointer=checkpoint.Checkpointer(args.out / "checkpoints", every=max(args.steps // 4, 1)),
    )
    trainer.restore()
    trainer.log(f"before: reward {sampling.mean_reward():.3f}")
    trainer.fit(args.steps)
    trainer.log(f"after: reward {sampling.mean_reward():.3f}")


def build() -> llama.Llama:
    rope = ops.Rope(16)
    cfg = llama.Config(
        vocab=VOCAB, num_layers=2, dim=64, mlp_dim=128, num_heads=4, num_kv_heads=2, head_dim=16, rope=rope
    )
    return llama.Llama(cfg, rngs=nnx.Rngs(0))


def reward(prompt: list[int], completion: list[int]) -> float:
    """Returns the share of tokens that are greater than the previous one; any token may follow the greatest."""
    text = np.array([prompt[-1], *completion])
    return float(np.mean((text[1:] > text[:-1]) | (text[:-1] == VOCAB - 1)))


class Sampling:
    """Completions by the newest weights, with their rewards."""

    trainer: training.Trainer

    def __init__(self, model: llama.Llama, args: argparse.Namespace):
        self.generator, self.args = inference.Generator(model, dtype=jnp.float32), args

    def batch(self, number: int):
        """Returns a batch and its metrics."""
        prompts, completions, rewards = self.draw(number)
        advantages = post_training.group_advantages(rewards)
        length = PROMPT + self.args.tokens
        batch = post_training.completion_batch(prompts, completions, advantages, length=length, sampler=SAMPLER)
        return batch, post_training.reward_metrics(rewards)

    def draw(self, number: int):
        self.generator.update(self.trainer.state.trainable)
        prompts = np.random.default_rng(number).integers(0, VOCAB, (self.args.prompts, PROMPT))
        prompts = prompts.repeat(self.args.group, axis=0).tolist()
        key, count = jax.random.key(number), self.args.tokens
        completions = self.generator.generate(prompts, max_new_tokens=count, sampler=SAMPLER, key=key)
        rewards = [reward(*both) for both in zip(prompts, completions, strict=True)]
        return prompts, completions, np.array(rewards).reshape(-1, self.args.group)

    def mean_reward(self) -> float:
        """Returns the mean reward of completions that are not trained on."""
        return float(np.mean([self.draw(10**6 + i)[2].mean() for i in range(4)]))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = functools.partial(parser.add_argument, metavar="N", type=int)
    add("--out", metavar="DIR", type=Path, default=Path("runs/reinforce"), help="output directory (%(default)s)")
    add("--steps", default=100, help="number of optimizer steps (%(default)s)")
    add("--prompts", default=16, help="prompts per step (%(default)s)")
    add("--group", default=8, help="completions per prompt (%(default)s)")
    add("--tokens", default=8, help="tokens per completion (%(default)s)")
    add("--learning-rate", metavar="X", type=float, default=1e-3, help="constant (%(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
