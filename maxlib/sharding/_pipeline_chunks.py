"""Which layers the stages of a pipeline hold, and which of them they compute when."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Chunks(NamedTuple):
    """The periods of a stack in `stages * repeats` consecutive chunks; stage `s` holds chunks `s`, `s + stages`, ...

    The first chunks have `size` periods, the last ones may have one less: what is missing there is idle.
    """

    periods: int
    stages: int
    repeats: int

    @property
    def size(self) -> int:
        return -(-self.periods // (self.stages * self.repeats))

    @property
    def in_order(self) -> bool:
        """Tells whether stages hold equal, consecutive parts of the stack, as an array over devices lies anyway."""
        return self.repeats == 1 and self.periods % self.stages == 0

    @property
    def works(self) -> np.ndarray:
        """Marks in `[stages, repeats, size]` where there is a period, and not an idle place."""
        number = self.stages * self.repeats
        idle = number * self.size - self.periods
        held = np.full(number, self.size) - (np.arange(number) >= number - idle)
        works = np.arange(self.size) < held[:, None]  # [chunks, size]
        # Chunk `r * stages + s` is the `r`-th of stage `s`.
        return np.swapaxes(works.reshape(self.repeats, self.stages, self.size), 0, 1)

    @property
    def index(self) -> np.ndarray:
        """Numbers in `[stages, repeats, size]` the period that lies there. Idle places borrow a real one: weights that
        were made up might give numbers that are not finite, whose gradient no mask can undo."""
        works = np.swapaxes(self.works, 0, 1)
        return np.swapaxes((np.cumsum(works) - 1).clip(0).reshape(works.shape), 0, 1)

    @property
    def places(self) -> np.ndarray:
        """Finds each period in `[stages * repeats * size]`."""
        places = np.flatnonzero(self.works)
        return places[np.argsort(self.index.reshape(-1)[places])]


def chunks(periods: int, stages: int, repeats: int) -> Chunks:
    """Cuts a stack. Raises ValueError where a stage would have nothing to do, or `repeats` made more idle places."""
    if periods < stages:
        raise ValueError(
            f"{periods} repeats of layers cannot be cut into {stages} stages; take a mesh with fewer stages, or give the "
            "stack a shorter period or prefix"
        )
    if (most := -(-periods // stages)) % repeats:
        raise ValueError(
            f"a stage holds up to {most} of {periods} repeats of layers, which repeats={repeats} of the pipeline must divide; "
            f"take one of {[n for n in range(1, most + 1) if most % n == 0]}"
        )
    return Chunks(periods, stages, repeats)


class Tick(NamedTuple):
    """The work of each stage in a tick; arrays `[stages]`.

    Attributes:
        microbatch: on which one it works.
        repeat: with which of its chunks.
        works: whether it works at all.
        entered: in which tick the chunk's input came.
    """

    microbatch: jax.Array
    repeat: jax.Array
    works: jax.Array
    entered: jax.Array


class Schedule(NamedTuple):
    """The order in which microbatches meet chunks.

    As many microbatches as there are stages follow each other through all chunks, then the next ones: what leaves the
    last stage enters the first one in the next tick (arXiv:2104.04473). A pass takes `ticks`, each the time of one
    chunk. Backward passes begin when the first microbatch has left the last chunk, after `lead` ticks.
    """

    stages: int
    microbatches: int
    repeats: int

    @property
    def all(self) -> np.ndarray:
        """Numbers the stages."""
        return np.arange(self.stages)

    @property
    def ticks(self) -> int:
        return self.microbatches * self.repeats + self.stages - 1

    @property
    def lead(self) -> int:
        return self.stages * self.repeats - 1

    @property
    def kept(self) -> int:
        """Counts the ticks of which a stage keeps the inputs, when backward passes begin early."""
        return 2 * self.lead + 1

    def forward(self, t: jax.Array, stage: np.ndarray | int) -> Tick:
        step = t - stage  # stage `s` begins `s` ticks after the first
        microbatch, repeat = self._meets(step)
        return Tick(microbatch, repeat, self._within(step), jnp.full_like(step, t))

    def backward(self, t: jax.Array, stage: np.ndarray | int) -> Tick:
        # The last stage goes backward first; it starts when the first microbatch has left the last chunk.
        step = t - self.lead - (self.stages - 1 - stage)
        microbatch, repeat = self._meets(step)
        repeat = self.repeats - 1 - repeat
        group, one = jnp.divmod(microbatch, self.stages)
        entered = (group * self.repeats + repeat) * self.stages + one + stage
        return Tick(microbatch, repeat, self._within(step), entered)

    def _within(self, step: jax.Array) -> jax.Array:
        return (step >= 0) & (step < self.microbatches * self.repeats)

    def _meets(self, step: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the microbatch, and how many chunks of the stage it has met before."""
        # `stages` microbatches in a row form a group, which goes around `repeats` times before the next one enters.
        turn, one = jnp.divmod(jnp.clip(step, 0, self.microbatches * self.repeats - 1), self.stages)
        group, repeat = jnp.divmod(turn, self.repeats)
        return group * self.stages + one, repeat
