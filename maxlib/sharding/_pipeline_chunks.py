"""Assigns layers to the stages of a pipeline, and defines its schedule.

Letters in comments: S stages, M microbatches, V repeats (rounds of a microbatch through all stages).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Chunks(NamedTuple):
    """The periods of a stack, split into `stages * repeats` consecutive chunks.

    Stage `s` has the chunks `s`, `s + stages`, `s + 2 * stages`, ... The first chunks have `size` periods, the last
    ones may have one less and then an idle slot.

    Args:
        periods: Number of times that the stack repeats its layers.
        stages: Devices along the pipeline axis (S).
        repeats: Chunks of each stage (V).
    """

    # Seven periods on S = 2 stages with V = 2 repeats, so four chunks of size 2 ("-" is idle):
    #            repeat 0   repeat 1
    #   stage 0    0 1        4 5
    #   stage 1    2 3        6 -
    periods: int
    stages: int
    repeats: int

    @property
    def size(self) -> int:
        """Counts the slots of a chunk: `ceil(periods / (stages * repeats))`."""
        return -(-self.periods // (self.stages * self.repeats))

    @property
    def in_order(self) -> bool:
        """Returns True if every stage has an equal, consecutive part of the stack, as in the plain sharding of an
        array.
        """
        return self.repeats == 1 and self.periods % self.stages == 0

    @property
    def active(self) -> np.ndarray:
        """Returns a mask of the slots that have a period, `[stages, repeats, size]`; False for idle slots."""
        number = self.stages * self.repeats
        idle = number * self.size - self.periods
        # There are fewer idle slots than chunks, so each of the last chunks loses one: [chunks]
        held = np.full(number, self.size) - (np.arange(number) >= number - idle)
        active = np.arange(self.size) < held[:, None]  # [chunks, size]
        # Chunk `r * stages + s` is the `r`-th of stage `s`: [chunks, size] -> [repeats, stages, size] -> swap.
        return np.swapaxes(active.reshape(self.repeats, self.stages, self.size), 0, 1)

    @property
    def index(self) -> np.ndarray:
        """Returns the period in each slot, `[stages, repeats, size]`; idle slots repeat the previous one."""
        # An idle slot computes with real weights and its result is masked. Dummy weights such as zeros may give inf or
        # NaN, and then 0 * NaN is NaN in the gradient despite the mask.
        active = np.swapaxes(self.active, 0, 1)
        return np.swapaxes((np.cumsum(active) - 1).clip(0).reshape(active.shape), 0, 1)

    @property
    def slots(self) -> np.ndarray:
        """Returns the inverse of `index`: the flat slot of each period, shape `[periods]`."""
        slots = np.flatnonzero(self.active)
        return slots[np.argsort(self.index.reshape(-1)[slots])]


def chunks(periods: int, stages: int, repeats: int) -> Chunks:
    """Splits a stack into chunks for the stages.

    Args:
        periods: How many times the stack repeats its layers.
        stages: Devices along the pipeline axis.
        repeats: Chunks of each stage.

    Raises:
        ValueError: when a stage would be left empty, or when `repeats` does not divide the most periods of a stage.
    """
    if periods < stages:
        raise ValueError(
            f"{periods} repeats of layers cannot be split into {stages} stages; use a mesh with fewer stages, or give "
            "the stack a shorter period or prefix"
        )
    if (most := -(-periods // stages)) % repeats:
        raise ValueError(
            f"a stage holds up to {most} of {periods} repeats of layers, which repeats={repeats} of the pipeline must divide; "
            f"use one of {[n for n in range(1, most + 1) if most % n == 0]}"
        )
    return Chunks(periods, stages, repeats)


class Tick(NamedTuple):
    """The work of each stage in one tick; every field is an array `[stages]`.

    Attributes:
        microbatch: Index of the microbatch.
        repeat: Index of the stage's own chunk, `0 .. repeats - 1`.
        active: False in the bubble, when the stage has nothing to do and its result is masked.
        entered: The tick in which this chunk read this microbatch in the forward pass.
    """

    microbatch: jax.Array
    repeat: jax.Array
    active: jax.Array
    entered: jax.Array


class Schedule(NamedTuple):
    """The schedule of a pipeline: which microbatch and chunk a stage computes in which tick.

    Microbatches pass through in groups of `stages`: a group passes through all chunks before the next group enters, and
    the output of the last stage enters the first one in the next tick (interleaving, arXiv:2104.04473). A tick is the
    time of one chunk.

    Args:
        stages: Devices along the pipeline axis (S).
        microbatches: Parts of the batch (M); a multiple of the stages if `repeats` is more than 1.
        repeats: Rounds of a microbatch through the stages (V); 1 is GPipe's schedule (arXiv:1811.06965).
    """

    # S = 3, M = 4, V = 1; a number is a microbatch, "." is the bubble. ticks = 4 * 1 + 3 - 1 = 6:
    #   tick      0  1  2  3  4  5
    #   stage 0   0  1  2  3  .  .
    #   stage 1   .  0  1  2  3  .
    #   stage 2   .  .  0  1  2  3
    #
    # S = 2, M = 4, V = 2; a letter is a chunk of layers: a, c on stage 0 and b, d on stage 1. ticks = 4 * 2 + 2 - 1:
    #   tick      0   1   2   3   4   5   6   7   8
    #   stage 0   0a  1a  0c  1c  2a  3a  2c  3c  .
    #   stage 1   .   0b  1b  0d  1d  2b  3b  2d  3d
    #
    # The bubble is S - 1 ticks in both, but a tick with V repeats is V times shorter. Idle share of the time:
    #   (S - 1) / (M * V + S - 1)

    stages: int
    microbatches: int
    repeats: int

    @property
    def all(self) -> np.ndarray:
        """Returns the indices of all stages, `[stages]`."""
        return np.arange(self.stages)

    @property
    def ticks(self) -> int:
        """Counts the ticks of a forward pass: `microbatches * repeats + stages - 1`."""
        return self.microbatches * self.repeats + self.stages - 1

    @property
    def lead(self) -> int:
        """Counts the ticks before the first microbatch reaches the last chunk, where its backward pass begins
        (1F1B).
        """
        return self.stages * self.repeats - 1

    @property
    def kept(self) -> int:
        """Counts the ticks whose inputs a stage keeps under 1F1B."""
        # Chunk 0 waits longest: it reads a microbatch in tick t and gets its gradient in tick t + 2 * lead, after it
        # has passed through the other lead = S * V - 1 chunks and back. The count does not depend on M.
        return 2 * self.lead + 1

    def forward(self, t: jax.Array, stage: np.ndarray | int) -> Tick:
        """Returns the forward work of `stage` (one index or `[stages]`) in tick `t`."""
        step = t - stage  # stage `s` begins `s` ticks after the first
        microbatch, repeat = self._microbatch_and_repeat(step)
        return Tick(microbatch, repeat, self._is_active(step), jnp.full_like(step, t))

    def backward(self, t: jax.Array, stage: np.ndarray | int) -> Tick:
        """Returns the backward work of `stage` in tick `t`, in the schedule 1F1B."""
        # The mirror image: the last stage begins in tick `lead`, and stage `s` follows S - 1 - s ticks later.
        step = t - self.lead - (self.stages - 1 - stage)
        microbatch, repeat = self._microbatch_and_repeat(step)
        repeat = self.repeats - 1 - repeat  # the last chunk first
        # `forward` solved for t: step = (group * V + repeat) * S + one, and t = step + stage.
        group, position = jnp.divmod(microbatch, self.stages)
        entered = (group * self.repeats + repeat) * self.stages + position + stage
        return Tick(microbatch, repeat, self._is_active(step), entered)

    def _is_active(self, step: jax.Array) -> jax.Array:
        """Returns True if a stage computes in this local step; otherwise it is in the bubble."""
        return (step >= 0) & (step < self.microbatches * self.repeats)

    def _microbatch_and_repeat(self, step: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the microbatch of a stage's local step, and its number of completed rounds."""
        # step = (group * V + repeat) * S + one: a group of S microbatches makes V rounds, then the next group does.
        rounds, position = jnp.divmod(jnp.clip(step, 0, self.microbatches * self.repeats - 1), self.stages)
        group, repeat = jnp.divmod(rounds, self.repeats)
        return group * self.stages + position, repeat
