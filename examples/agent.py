"""Train a small model to use tools over several turns (GRPO): an agent with a calculator. Fork me.

The task is such as "3*7+25": the model has to call `multiply`, read the product, call `add`, and say the sum. It starts
from random weights, reads demonstrations most of which contain a mistake, and then learns from rewards only which of
what it saw is right: within ten minutes on a CPU. To use a model and tools of your own, replace `build` by
`maxlib.from_pretrained`, and `TOOLS`, `question` and `reward`; then there is no need for demonstrations.

With --server, vLLM servers sample while the model trains. Start them with what `--steps 0` writes:

    VLLM_SERVER_DEV_MODE=1 vllm serve runs/agent/model --served-model-name policy --skip-tokenizer-init \\
        --dtype float32 --max-num-batched-tokens 16384 --enforce-eager

vLLM on a CPU fails at seeds for prompts that it computes in pieces, so all of a step must fit its tokens of a batch.
Where it shares cores with the training, set OMP_NUM_THREADS=1, VLLM_CPU_OMP_THREADS_BIND=nobind and
VLLM_ENABLE_V1_MULTIPROCESSING=0: else its threads and processes wait for each other in busy loops.
"""

import argparse
import functools
import json
import random
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import maxlib
from maxlib import checkpoint, inference, nn, ops, post_training, tokenization, training
from maxlib.models import llama

LENGTH, TURN, TURNS = 112, 28, 4  # most tokens of a session and of a turn, most turns
SAMPLER = inference.Sampler(temperature=1.0)
TEMPLATE = tokenization.ChatTemplate(
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SPECIAL = "<user>", "<assistant>", "<tool>", "<end>", "<tool_call>", "</tool_call>"


def multiply(a: int, b: int) -> int:
    """Multiplies two numbers."""
    return a * b


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


TOOLS = [multiply, add]


def call(name: str, a: int, b: int) -> str:
    return "<tool_call>" + json.dumps({"name": name, "arguments": {"a": a, "b": b}}) + "</tool_call><end>"


def tokenizer_of_calls():
    """Returns a tokenizer that writes each digit as a token of its own, as it saw none."""
    calls = [call(tool.__name__, 0, 0).replace("0", " ") for tool in TOOLS]
    return tokenization.train_bpe(calls, vocab_size=320, special_tokens=SPECIAL)


TOKENIZER = tokenizer_of_calls()
END = TOKENIZER.encode("<end>", add_special_tokens=False).ids


def question(number: int) -> tuple[int, int, int]:
    draw = random.Random(number)
    return draw.randint(2, 9), draw.randint(2, 9), draw.randint(10, 99)


def environment(task: tuple[int, int, int]) -> post_training.ToolChat:
    """Returns the environment of a task."""
    a, b, c = task

    def reward(messages: list[dict]) -> float:
        return float(messages[-1]["role"] == "assistant" and messages[-1]["content"] == str(a * b + c))

    messages = [{"role": "user", "content": f"{a}*{b}+{c}"}]
    return post_training.ToolChat(
        messages, TOOLS, reward, tokenizer=TOKENIZER, template=TEMPLATE, format="hermes", stop_token_ids=END
    )


def demonstration(number: int, right: float) -> post_training.Trajectory:
    """Returns a session of which each turn is right with a probability, else made with the other tool or number."""
    (a, b, c), draw = question(number), random.Random(-1 - number)
    session, turns = environment((a, b, c)), []
    prompt = session.reset()

    def tool(name: str) -> str:
        return name if draw.random() < right else {"multiply": "add", "add": "multiply"}[name]

    def say(text: str) -> None:
        nonlocal prompt
        tokens = TOKENIZER.encode(text, add_special_tokens=False).ids
        turns.append((prompt, inference.Completion(tokens, [0.0] * len(tokens), "stop", SAMPLER)))
        prompt = session.step(tokens)

    say(call(tool("multiply"), a, b))
    first = session.messages[-1]["content"]
    say(call(tool("add"), int(first), c))
    second = session.messages[-1]["content"]
    say((second if draw.random() < right else first) + "<end>")
    return post_training.join_turns(turns)[0]


def main() -> None:
    args = arguments()
    model = llama.Llama(
        llama.Config(
            vocab=TOKENIZER.get_vocab_size(), num_layers=3, dim=128, mlp_dim=256, num_heads=4, num_kv_heads=4,
            head_dim=32, rope=ops.Rope(32, max_length=LENGTH),
        ),
        rngs=nnx.Rngs(0),
    )  # fmt: skip
    checkpointer = checkpoint.Checkpointer(args.out / "checkpoints", every=max(args.steps // 4, 1))
    sampling = Sampling(model, args)
    if checkpointer.latest() is None:
        model = demonstrated(model, args)
    sampling.trainer = trainer = training.Trainer(
        model,
        optimizer=training.adamw(args.learning_rate),
        loader=sampling.loader(),
        loss=post_training.DAPO(temperature=SAMPLER.temperature),
        dtype=jnp.float32,
        directory=args.out,
        checkpointer=checkpointer,
    )
    trainer.restore()
    with sampling.environments:
        trainer.log(f"before: reward {sampling.mean_reward():.3f}")
        trainer.fit(args.steps)
        trainer.log(f"after: reward {sampling.mean_reward():.3f}")
        sampling.save("model", trainer.state.trainable)


def demonstrated(model: llama.Llama, args: argparse.Namespace) -> llama.Llama:
    """Trains a model on demonstrations."""

    def batch(number: int):
        sessions = [demonstration(number * 64 + i, args.right) for i in range(64)]
        rows = post_training.trajectory_batch(sessions, np.zeros(64), length=LENGTH)
        return {name: rows[name] for name in ("tokens", "targets", "segment_ids")}, {}

    schedule = training.warmup_cosine(2e-3, args.demonstrations, warmup=args.demonstrations // 10)
    rollouts = post_training.Rollouts(batch)
    trainer = training.Trainer(model, optimizer=training.adamw(schedule), loader=rollouts, dtype=jnp.float32)
    trainer.fit(args.demonstrations)
    return trainer.model


class Sampling:
    """Episodes by the newest weights, with their rewards."""

    trainer: training.Trainer

    def __init__(self, model: llama.Llama, args: argparse.Namespace):
        if args.server:
            self.engines = [
                inference.ReloadingServerEngine(url, "policy", save=functools.partial(self.save, f"server-{n}"))
                for n, url in enumerate(args.server)
            ]
        else:
            self.engines = [inference.LocalEngine(model, slots=64, capacity=LENGTH, dtype=jnp.float32)]
        self.environments = post_training.EnvironmentPool(environment, workers=2, in_threads=True)
        self.args = args

    def loader(self):
        """Returns the loader of batches: servers sample while the model trains, with weights of the step before."""

        def in_turn(number: int):
            self.engines[0].update(self.trainer.state.trainable)
            return self.batch(self.engines[0], number)

        def newest():
            return jax.tree.map(jnp.copy, self.trainer.state.trainable)

        if not self.args.server:
            return post_training.Rollouts(in_turn)
        return post_training.AsyncRollouts(self.batch, self.engines, newest, max_staleness=1)

    def save(self, name: str, params: dict) -> Path:
        """Writes the model with its newest weights; each server has a directory that no other one changes."""
        path = self.args.out / name
        maxlib.save_pretrained(nn.combine(params, self.trainer.state.rest), path, overwrite=True)
        return path

    def batch(self, engine: inference.Engine, number: int):
        """Returns a batch and its metrics."""
        episodes = self.episodes(engine, number)
        rewards = np.array([episode.reward for episode in episodes]).reshape(-1, self.args.group)
        advantages = post_training.group_advantages(rewards).reshape(-1)
        sessions = [(s, a) for episode, a in zip(episodes, advantages, strict=True) for s in episode.trajectories]
        batch = post_training.trajectory_batch(*zip(*sessions, strict=True), length=LENGTH, rows=len(episodes))
        batch["old_log_probs"] = batch["sampler_log_probs"]  # of weights that may be a step old
        return batch, post_training.reward_metrics(rewards) | post_training.episode_metrics(episodes)

    def episodes(self, engine: inference.Engine, number: int) -> list[post_training.Episode]:
        first = number * self.args.tasks
        tasks = [question(first + i) for i in range(self.args.tasks) for _ in range(self.args.group)]
        return post_training.run_episodes(
            engine,
            self.environments,
            tasks,
            length=LENGTH,
            max_new_tokens=TURN,
            max_turns=TURNS,
            sampler=SAMPLER,
            stop_token_ids=END,
            key=jax.random.key(number),
        )

    def mean_reward(self) -> float:
        """Returns the mean reward of episodes that are not trained on."""
        engine = self.engines[0]
        engine.update(self.trainer.state.trainable)
        return float(np.mean([episode.reward for i in range(4) for episode in self.episodes(engine, 10**6 + i)]))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = functools.partial(parser.add_argument, metavar="N", type=int)
    add("--out", metavar="DIR", type=Path, default=Path("runs/agent"), help="output directory (%(default)s)")
    add("--steps", default=80, help="number of optimizer steps (%(default)s)")
    add("--demonstrations", default=300, help="steps on demonstrations before them (%(default)s)")
    add("--right", metavar="X", type=float, default=0.6, help="share of right turns in these (%(default)s)")
    add("--tasks", default=8, help="tasks per step (%(default)s)")
    add("--group", default=8, help="episodes per task (%(default)s)")
    add("--learning-rate", metavar="X", type=float, default=3e-4, help="constant (%(default)s)")
    add("--server", metavar="URL", type=str, nargs="*", help="addresses of vLLM servers, instead of this process")
    return parser.parse_args()


if __name__ == "__main__":
    main()
