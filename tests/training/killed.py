"""A training loop to be killed: `python -m tests.training.killed DIRECTORY` resumes from the newest checkpoint of the
directory.
"""

import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from maxlib.checkpoint import Checkpointer

STEPS, EVERY, SIZE = 16, 4, 1 << 18
TX = optax.adam(1e-2)


@jax.jit
def fresh() -> dict:
    params = {"w": jax.random.normal(jax.random.key(0), (SIZE,))}
    return {"params": params, "opt": TX.init(params), "rest": {"key": jax.random.key(1)}}


def update(state: dict, batch: jax.Array) -> dict:
    key, noise = jax.random.split(state["rest"]["key"])
    grads = {"w": jnp.sin(state["params"]["w"] * batch[0]) + jax.random.normal(noise, (SIZE,))}
    updates, opt = TX.update(grads, state["opt"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt, "rest": {"key": key}}


step_fn = jax.jit(update, donate_argnums=0)


def train(directory: str, log: Callable[[str], None] = lambda _: None) -> tuple[dict, int]:
    """The final state, and the step it began with."""
    data = np.random.default_rng(0)
    with Checkpointer(directory, keep=2, every=EVERY) as ck:
        state, begin = fresh(), ck.latest() or 0
        if begin:
            restored = ck.restore(like=state)
            state = {name: restored[name] for name in state}
            data.bit_generator.state = restored["data"]["0"]
        for step in range(begin + 1, STEPS + 1):
            state = step_fn(state, jnp.asarray(data.normal(size=8), jnp.float32))
            log(f"step {step}")
            if ck.should_save(step):
                ck.save(step, state, data={"0": data.bit_generator.state})
                log(f"saving {step}")
    return state, begin


if __name__ == "__main__":
    train(sys.argv[1], lambda line: print(line, flush=True))
