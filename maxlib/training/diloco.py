"""DiLoCo: replicas that train alone and meet rarely (Douillard et al. 2023, arXiv:2311.08105; streaming, 2501.18512).

Between two meetings no number crosses the slow network: each replica has its own parameters and optimizer state, on a
leading axis that is split over one axis of the mesh. At a meeting the mean of how far the replicas went is the gradient
of an outer optimizer, whose parameters all replicas take over.
"""

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from maxlib import nn, sharding
from maxlib._utils.varying import NO_MESH
from maxlib.training._state import TrainState
from maxlib.training._step import CompiledStep, Metrics, Step, jit_step
from maxlib.training.losses import Batch

_SUMS = ("num_targets", "num_tokens")
_LARGEST = {"int4": 7.0, "int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57_344.0}  # others are not scaled


@nn.pytree
class DiLoCoState:
    """The optimizer state of a `TrainState` under DiLoCo.

    Attributes:
        params: Each replica's parameters by path, with a leading axis of replicas.
        inner: Each replica's optimizer state.
        outer: The outer optimizer's state of each fragment.
    """

    params: dict[str, Any]
    inner: Any
    outer: list[Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiLoCo:
    """Settings of DiLoCo, which `Trainer(diloco=)` takes. By hand:

        diloco = training.DiLoCo(replicas=4, every=100)
        step = diloco.wrap(training.make_train_step(training.NextToken(), optimizer))
        state = diloco.init(training.make_state(model, optimizer))
        state, metrics = step(state, batch)  # of all replicas' rows

    `state.model`, which is evaluated and exported, has the outer parameters: those of the last meeting.

    Args:
        replicas: Number of replicas, among which the rows of a batch are divided.
        every: Inner steps between two meetings about the same parameter.
        outer: The outer optimizer; by default SGD with Nesterov momentum of 0.9 and a rate of 0.7.
        fragments: Number of parts of the model that meet at different steps (streaming DiLoCo). Layers of a stack go to
            the fragments in turn, all other parameters to the first.
        delay: Inner steps between the beginning of a meeting and the use of its result, so that they can overlap.
        mix: Share of a replica's own parameters that it keeps when it takes over the outer ones.
        average_moments: Whether replicas also take over the mean of their optimizer states (Local Adam;
            arXiv:2505.22549), which under AdamW triples the traffic of a meeting. A replica with few rows has moments
            that are mostly noise; with their mean, the loss stays nearer to that of data parallelism.
        dtype: Dtype in which replicas send how far they went: "int4", "int8" or a float8, each array scaled by its
            largest number, or "bfloat16"; None for float32.
        axis: Axis of the mesh over which replicas are split; it should cross the slow network, as with
            `make_mesh(fsdp=-1, dcn={"data": 4})`.

    Raises:
        ValueError: when a number is not positive, fragments do not divide the steps, the delay is no shorter than the
            steps between meetings, or moments would be averaged after a delay.
    """

    replicas: int
    every: int
    outer: optax.GradientTransformation = dataclasses.field(
        default_factory=lambda: optax.sgd(0.7, momentum=0.9, nesterov=True)
    )
    fragments: int = 1
    delay: int = 0
    mix: float = 0.0
    average_moments: bool = False
    dtype: Any = None
    axis: str = "data"

    def __post_init__(self):
        if min(self.replicas, self.every, self.fragments) < 1 or not 0 <= self.mix < 1:
            raise ValueError(f"replicas, every and fragments must be positive, and mix in [0, 1); got {self}")
        if self.every % self.fragments:
            raise ValueError(f"fragments={self.fragments} must divide every={self.every}, to meet at equal distances")
        if not 0 <= self.delay < self.every:
            raise ValueError(f"delay must lie in [0, every), got {self.delay} for every={self.every}")
        if self.average_moments and self.delay:
            raise ValueError(f"moments are averaged at once, so average_moments needs delay=0, got {self.delay}")

    def init(self, state: TrainState) -> TrainState:
        """Returns the state with `DiLoCoState`, all replicas at its parameters; under a layout, as shards.

        Raises:
            ValueError: when moments in eight bits would be averaged.
        """
        fragments = [self._fragment(state, n) for n in range(self.fragments)]
        if self.average_moments and "float8" in str([x.dtype for x in jax.tree.leaves(state.opt_state)]):
            raise ValueError("eight-bit moments have scales of their own in each replica: average moments of float32")

        def build(state: TrainState) -> TrainState:
            params, inner = (
                jax.tree.map(lambda x: jnp.broadcast_to(x, (self.replicas, *x.shape)), tree)
                for tree in (state.trainable, state.opt_state)
            )
            outer = [self.outer.init(_part(state.trainable, fragment)) for fragment in fragments]
            params, inner = self._split(state, (params, inner))
            return dataclasses.replace(state, opt_state=DiLoCoState(params, inner, outer))

        with self._inside():
            return jax.jit(build)(state)

    def resized(self, state: TrainState, replicas: int) -> tuple["DiLoCo", TrainState]:
        """Returns settings and state for another number of replicas, to go on with more or fewer slices.

        New replicas begin at the outer parameters with the first one's optimizer state; the last ones leave. What they
        learned since the last meeting is lost.

        Args:
            state: A state of this number of replicas.
            replicas: The new number.
        """
        new, common = dataclasses.replace(self, replicas=replicas), min(replicas, self.replicas)
        opt_state = state.opt_state

        def grow(old: Any, first: Any) -> Any:
            return jnp.concatenate([old[:common], jnp.broadcast_to(first, (replicas - common, *old.shape[1:]))])

        params = {path: grow(x, state.trainable[path]) for path, x in opt_state.params.items()}
        inner = jax.tree.map(lambda x: grow(x, x[0]), opt_state.inner)
        return new, dataclasses.replace(state, opt_state=DiLoCoState(params, inner, opt_state.outer))

    def wrap(self, step: Step) -> "DiLoCoStep":
        """Returns a compiled step of all replicas from the step of one, made by `make_train_step`.

        Biases of routers must stay as they are (`router_bias_update_rate=0`): replicas would need one another's counts.
        """
        return DiLoCoStep(self, step)

    def meetings(self, step: int) -> list[tuple[int, bool, bool]]:
        """Lists what happens after a step: fragments, whether each is sent, and whether its result is taken over."""
        apart = self.every // self.fragments
        events = []
        for n in range(self.fragments):
            since = step - n * apart  # steps since this fragment's turn
            sends = step > 0 and since >= 0 and since % self.every == 0
            first = self.every if n == 0 else 0  # the first fragment meets after a whole period
            takes = since - self.delay >= first and (since - self.delay) % self.every == 0
            if sends or takes:
                events.append((n, sends, takes))
        return events

    def _fragment(self, state: TrainState, n: int) -> dict[str, slice]:
        """Returns the rows of each parameter in fragment `n`: layers in turn, other parameters in the first."""
        stacked = nn.tree.stacked_paths(state.rest)
        rows = {}
        for path, x in state.trainable.items():
            if path in stacked and len(x) > n:
                rows[path] = slice(n, None, self.fragments)
            elif path not in stacked and n == 0:
                rows[path] = slice(None)
        return rows

    def _send(self, state: TrainState, n: int) -> TrainState:
        """Takes an outer step with the mean of how far the replicas went."""
        rows, opt_state = self._fragment(state, n), state.opt_state
        outer = _part(state.trainable, rows)
        moved = {path: x[None] - opt_state.params[path][:, rows[path]] for path, x in outer.items()}  # replicas first
        gradient = jax.tree.map(self._mean, moved)
        updates, new = self.outer.update(gradient, opt_state.outer[n], outer)
        trainable = dict(state.trainable)
        for path, update in cast(dict[str, Array], updates).items():
            trainable[path] = trainable[path].at[rows[path]].add(update)
        states = [new if i == n else old for i, old in enumerate(opt_state.outer)]
        return dataclasses.replace(
            state, trainable=trainable, opt_state=DiLoCoState(opt_state.params, opt_state.inner, states)
        )

    def _take(self, state: TrainState, n: int) -> TrainState:
        """Lets replicas take over the outer parameters."""
        rows, opt_state, params = self._fragment(state, n), state.opt_state, dict(state.opt_state.params)
        for path, part in rows.items():
            outer, local = state.trainable[path][part][None], params[path][:, part]
            params[path] = params[path].at[:, part].set((1 - self.mix) * outer + self.mix * local)
        inner = _averaged(state, rows) if self.average_moments else opt_state.inner
        params, inner = self._split(state, (params, inner))
        return dataclasses.replace(state, opt_state=DiLoCoState(params, inner, opt_state.outer))

    def _mean(self, moved: Array) -> Array:
        """Returns the mean over replicas, sent in `dtype`."""
        if self.dtype is None:
            return moved.mean(axis=0)
        dtype = jnp.dtype(self.dtype)
        size = jnp.max(jnp.abs(moved), axis=tuple(range(1, moved.ndim)), keepdims=True)
        scale = jnp.where((size > 0) & (dtype.name in _LARGEST), size / _LARGEST.get(dtype.name, 1.0), 1.0)
        scaled = moved / scale
        sent = (jnp.round(scaled) if jnp.issubdtype(dtype, jnp.integer) else scaled).astype(dtype)
        if sharding.current() is not None:  # gather the narrow numbers, and add them up here
            sent = jax.lax.with_sharding_constraint(sent, P())
        return (sent.astype(jnp.float32) * scale).mean(axis=0)

    def _inside(self) -> Any:
        """Returns the context of a replica: the active layout without the axis of replicas."""
        layout = sharding.current()
        return contextlib.nullcontext() if layout is None else sharding.use(self._layout(layout))

    def _layout(self, layout: sharding.Layout) -> sharding.Layout:
        rules: Mapping[str, Any] = {
            name: tuple(axis for axis in layout.mesh_axes(name) if axis != self.axis) or None
            for name in layout.rules
            if self.axis in layout.mesh_axes(name)
        }
        with warnings.catch_warnings():  # no rule of a replica names the axis of replicas
            warnings.filterwarnings("ignore", "nothing is split over")
            return layout | rules

    def _over_replicas(self) -> str | None:
        """Returns the axis of the mesh over which replicas are split; None without a layout."""
        layout = sharding.current()
        return None if layout is None or layout.mesh.shape[self.axis] == 1 else self.axis

    def _split(self, state: TrainState, tree: Any) -> Any:
        """Splits arrays with a leading axis of replicas over the mesh, and each replica's part as parameters are."""
        layout, axis = sharding.current(), self._over_replicas()
        if layout is None:
            return tree
        names = nn.tree.axes(state.rest)

        def put(path: Any, x: Array) -> Array:
            name = _parameter_of(state, path, x)
            spec = P() if name is None else layout.parameter_spec(names[name], x.shape[1:], path=name)
            return jax.lax.with_sharding_constraint(x, P(axis, *spec))

        return jax.tree_util.tree_map_with_path(put, tree)


class DiLoCoStep:
    """The compiled step of all replicas: a program for inner steps, and one for each kind of meeting.

    Metrics are means over the replicas of this process, so that between meetings nothing crosses the slow network.

    Args:
        diloco: The settings.
        step: The step of one replica.
    """

    def __init__(self, diloco: DiLoCo, step: Step):
        self.diloco = diloco
        self.inner: CompiledStep = jit_step(self._all_replicas(step))
        self._meet = jax.jit(self._meeting, static_argnums=1, donate_argnums=0)
        self._last: Any = None  # the state returned last, and its step
        self._step = 0

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Takes an inner step of every replica, and the meetings that follow it."""
        done = self._step if state is self._last else int(state.step)
        with self.diloco._inside():
            state, metrics = self.inner(state, batch)
            for event in self.diloco.meetings(done + 1):
                state = self._meet(state, event)
        self._last, self._step = state, done + 1
        return state, self.over_here(metrics)

    def over_here(self, metrics: Metrics) -> Metrics:
        """Returns metrics of this process's replicas, `R` each, as one number; sums are those of all replicas."""
        with jax.set_mesh(NO_MESH):  # a process's part is on one device, whatever mesh the caller has set
            return {name: _over_here(name, x, self.diloco.replicas) for name, x in metrics.items()}

    def lower(self, state: TrainState, batch: Batch) -> jax.stages.Lowered:
        """Lowers the inner step."""
        with self.diloco._inside():
            return self.inner.lower(state, batch)

    def _meeting(self, state: TrainState, event: tuple[int, bool, bool]) -> TrainState:
        fragment, sends, takes = event
        state = self.diloco._send(state, fragment) if sends else state
        return self.diloco._take(state, fragment) if takes else state

    def _all_replicas(self, step: Step) -> Step:
        count = self.diloco.replicas

        def of_one(params: Any, inner: Any, key: Array, rows: Batch, state: TrainState) -> Any:
            new, metrics = step(TrainState(params, state.rest, inner, state.step, key), rows)
            return new.trainable, new.opt_state, metrics

        def run(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
            axis = self.diloco._over_replicas()
            keys = jax.vmap(jax.random.fold_in, (None, 0))(state.key, jnp.arange(count))
            rows = jax.tree.map(lambda x: _divided(x, count, axis), batch)
            every: Callable = jax.vmap(of_one, (0, 0, 0, 0, None), spmd_axis_name=axis)
            params, inner, metrics = every(state.opt_state.params, state.opt_state.inner, keys, rows, state)
            params, inner = self.diloco._split(state, (params, inner))
            opt_state = DiLoCoState(params, inner, state.opt_state.outer)
            return TrainState(state.trainable, state.rest, opt_state, state.step + 1, state.key), metrics

        return run


def _over_here(name: str, x: Any, replicas: int) -> Array:
    if not x.is_fully_addressable:  # a process's replicas may be on several of its devices
        parts = {shard.index[0].start or 0: shard.data for shard in x.addressable_shards}
        device = next(iter(parts.values())).device
        x = jnp.concatenate([jax.device_put(parts[start], device) for start in sorted(parts)])
    if name in _SUMS:
        return jnp.sum(x) * (replicas // len(x))
    return jnp.all(x) if x.dtype == bool else jnp.mean(x)


def _divided(x: Array, replicas: int, axis: str | None) -> Array:
    """Returns the rows of each replica, `R B/R ...`."""
    if len(x) % replicas:
        raise ValueError(f"a batch of {len(x)} rows does not divide over {replicas} replicas of DiLoCo")
    x = x.reshape(replicas, len(x) // replicas, *x.shape[1:])
    return x if axis is None else jax.lax.with_sharding_constraint(x, P(axis, *(P.UNCONSTRAINED,) * (x.ndim - 1)))


def _averaged(state: TrainState, rows: dict[str, slice]) -> Any:
    """Returns the replicas' optimizer states with the mean in these rows of arrays that have a parameter's shape."""

    def average(path: Any, x: Array) -> Array:
        name = _parameter_of(state, path, x)
        if name not in rows:
            return x
        return x.at[:, rows[name]].set(x[:, rows[name]].mean(axis=0))

    return jax.tree_util.tree_map_with_path(average, state.opt_state.inner)


def _parameter_of(state: TrainState, path: Any, x: Array) -> str | None:
    """Returns the path of the parameter to which an array with a leading axis of replicas belongs."""
    for name in (getattr(part, "key", None) for part in path):
        if name in state.trainable and x.shape[1:] == state.trainable[name].shape:
            return name
    return None


def _part(trainable: dict[str, Any], rows: dict[str, slice]) -> dict[str, Any]:
    return {path: trainable[path][part] for path, part in rows.items()}
