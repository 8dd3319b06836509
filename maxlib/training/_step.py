"""The training step: a pure function from state and batch to state and metrics."""

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool

from maxlib import nn, sharding
from maxlib.distributed import xla_flags
from maxlib.hardware import current_device
from maxlib.nn.router import expert_bias_paths, moved_biases
from maxlib.training._gradients import bind_options, divisor, gradient
from maxlib.training._offload import apply_updates, update
from maxlib.training._optimizer_wrappers import ema_model
from maxlib.training._pipelined_gradient import pipelined_gradient
from maxlib.training._placement import batch_axes, place_like_parameters
from maxlib.training._qk_clip import clip_queries_and_keys, max_logits_taps
from maxlib.training._state import TrainState
from maxlib.training.losses import Batch, Loss, LossFunction, MacroMean, Quotient, Stats, check_remat_names

Metrics = dict[str, Any]
_OWN_METRICS = {"max_logit", "loss", "grad_norm", "finite", "num_targets", "num_tokens", "skipped", "learning_rate"}
Step = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]


def make_train_step(
    loss: LossFunction,
    optimizer: optax.GradientTransformation,
    *,
    dtype: Any = None,
    remat: nn.remat.Policy = None,
    microbatches: int = 1,
    neftune_alpha: float | None = None,
    dropout: Mapping[str, float] | None = None,
    log_schedule: optax.Schedule | None = None,
    router_bias_update_rate: float = 1e-3,
    qk_clip: float | None = None,
) -> Step:
    """Makes `step(state, batch) -> (state, metrics)`, pure; jit it with its state donated, or use `jit_step`.

    The step follows the gradient of the mean over the targets. Metrics: `loss` (what is minimized), `num_targets`,
    `num_tokens` (without padding), `grad_norm` (before clipping), `finite` (False if the loss or the gradient norm is
    NaN or infinite; the new state is then invalid), `skipped` (with `skip_spikes`), and the means of the loss's own
    sums.

        step = training.jit_step(training.make_train_step(training.NextToken(), optimizer))
        state, metrics = step(training.make_state(model, optimizer), batch)

    Args:
        loss: A `Loss` such as `NextToken()`, or a function `(model, batch, key) -> (sum over targets, Stats)`.
        optimizer: Optimizer of `{path: array}`.
        dtype: Dtype of the computation; None for the loss's default, bfloat16.
        remat: What layers keep for the backward pass, see `nn.remat`; None keeps everything. A plain function gets
            `dtype` and `remat` as keyword arguments, if they are not None.
        microbatches: Number of parts of a batch whose gradients are computed one after the other, which takes less
            memory. If the loss is a sum over targets, the step equals that of the whole batch. Terms that depend on a
            whole batch, such as a router's balance loss, are computed per microbatch, and each microbatch draws its own
            random numbers. A 1F1B pipeline has its own microbatches.
        neftune_alpha: Size of noise that is added to token vectors (NEFTune, arXiv:2310.05914): uniform in
            ±alpha / √(L D), L the number of real tokens of the document; 5 is usual, None for no noise. The model needs
            `embed_inputs` and `embed_tokens`, like `nn.Decoder`.
        dropout: Probability of a zero by name of an intermediate value, such as `{"attn": 0.1, "mlp": 0.1}`; see
            `nn.with_dropout`. None drops nothing. Pipelines do not support it.
        log_schedule: Schedule to log as `learning_rate`. It does not change the rate: pass the same schedule to the
            optimizer.
        router_bias_update_rate: Step size of the expert biases of trained routers (arXiv:2408.15664), for models that
            have them (`nn.Router(expert_bias=True)`). 0 freezes them. The default is that of DeepSeek V3.
        qk_clip: Largest attention logit, 100 in Kimi K2 (MuonClip, arXiv:2507.20534). After a step, the projections of
            queries and keys of each head whose logits exceeded it in the step's forward pass are scaled down; the
            metric `max_logit` is the largest one. It costs one more product of queries and keys in the forward pass.
            For layers of `nn.Attention` without norms of queries and keys, and `nn.MLA`. None clips nothing.

    Raises:
        TypeError: when the loss does not take these options; in a step, when a 1F1B pipeline cannot take the loss.
        ValueError: for less than one microbatch, or `qk_clip` that is not positive; in a step, for a pipeline or a
            layer that `qk_clip` does not support; for a metric of the loss that has one of the names above;
            for a batch whose rows (of a microbatch) or sequence the layout does not divide; or for a name in `remat`
            that no layer marks.
    """
    gradient_of = make_gradient(
        loss, dtype=dtype, remat=remat, microbatches=microbatches, neftune_alpha=neftune_alpha, dropout=dropout
    )
    optimizer = optax.with_extra_args_support(optimizer)
    if qk_clip is not None and qk_clip <= 0:
        raise ValueError(f"qk_clip must be the largest attention logit, a number above 0, got {qk_clip}")

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        if isinstance(loss, Loss):
            loss.warn_of_unread(batch)
        for x in jax.tree.leaves(batch):
            _check_divides(x, microbatches)
        key = jax.random.fold_in(state.key, state.step)
        batch = jax.tree.map(_by_rows, batch)
        check_remat_names(remat, state.trainable, state.rest, batch)
        if qk_clip is None:
            (grads, value, stats), max_logits = gradient_of(state.trainable, state.rest, batch, key), {}
        else:
            taps, rest = max_logits_taps(state.trainable, state.rest)
            grads, value, stats = gradient_of(state.trainable | taps, rest, batch, key)
            max_logits = {path: grads.pop(path) for path in taps}
        _check_metric_names(stats)
        grads = place_like_parameters(grads, state.trainable, state.rest, optimizer=True)
        norm = optax.tree.norm(jax.tree.map(lambda g: g.astype(jnp.float32), grads))
        trainable, opt_state = _updated(optimizer, state, grads, value)
        skipped = optax.tree.get(opt_state, "skipped")  # None without `skip_spikes`
        metrics = {"loss": value, "grad_norm": norm, "num_targets": stats.num_targets, "num_tokens": num_tokens(batch)}
        metrics |= _health(value, norm, skipped) | means(stats)
        if qk_clip is not None:
            clipped = clip_queries_and_keys(trainable, state.rest, max_logits, limit=qk_clip, skipped=skipped)
            trainable = place_like_parameters(clipped, state.trainable, state.rest)
            metrics["max_logit"] = jnp.max(jnp.stack([jnp.max(x) for x in max_logits.values()]))
        if log_schedule is not None:
            spikes = optax.tree.get(state.opt_state, "SpikeState")  # schedules do not count the steps that it skipped
            num_updates = state.step if spikes is None else spikes.count
            metrics["learning_rate"] = jnp.asarray(log_schedule(num_updates), jnp.float32)
        rest, rate = state.rest, cast(Any, router_bias_update_rate)
        if router_bias_update_rate:
            rest = _with_moved_biases(rest, state.trainable, stats.expert_counts, rate=rate, skipped=skipped)
        return TrainState(trainable, rest, opt_state, state.step + 1, state.key), _everywhere(metrics)

    return step


def make_gradient(
    loss: LossFunction,
    *,
    dtype: Any = None,
    remat: nn.remat.Policy = None,
    microbatches: int = 1,
    neftune_alpha: float | None = None,
    dropout: Mapping[str, float] | None = None,
) -> Callable[..., tuple[dict[str, Any], Array, Stats]]:
    """Makes `gradient(trainable, rest, batch, key)`, the gradient of the mean loss, the mean loss, and `Stats`.

    The schedule of the active layout's pipeline decides how it is computed. Arguments are those of `make_train_step`.
    """
    bound = bind_options(loss, dtype=dtype, remat=remat, neftune_alpha=neftune_alpha, dropout=dropout)
    if microbatches < 1:
        raise ValueError(f"a batch needs at least one microbatch, got {microbatches}")

    def gradient_of(trainable: dict[str, Any], rest: Any, batch: Batch, key: Array) -> Any:
        layout = sharding.current()
        if dropout and layout is not None and layout.pipeline is not None:
            raise ValueError("dropout is not supported in a pipeline: use a layout without one, or no dropout")
        if layout is None or layout.pipeline is None or layout.pipeline.schedule == "gpipe":
            return gradient(bound, trainable, rest, batch, key, microbatches=microbatches)
        if microbatches > 1:
            raise ValueError(
                f"microbatches={microbatches} cannot be combined with a 1F1B pipeline, which has its own: leave it out, "
                "and set those of sharding.Pipeline"
            )
        return pipelined_gradient(
            loss, trainable, rest, batch, key, dtype=dtype, remat=remat, neftune_alpha=neftune_alpha
        )

    return gradient_of


def _updated(
    optimizer: optax.GradientTransformationExtraArgs, state: TrainState, grads: dict[str, Any], loss: Array
) -> tuple[dict[str, Any], Any]:
    """Returns the new parameters and optimizer state, with the shardings of the old ones."""
    extra = {"value": loss, "stacked": nn.tree.stacked_paths(state.rest)}  # for decay, and offloading by layer
    updates, opt_state = update(optimizer, grads, state.opt_state, state.trainable, **extra)
    trainable = place_like_parameters(apply_updates(state.trainable, updates), state.trainable, state.rest)
    return trainable, place_like_parameters(opt_state, state.trainable, state.rest, optimizer=True)


def _health(loss: Array, norm: Array, skipped: Array | None) -> Metrics:
    """Returns `finite`, and `skipped` if the optimizer skips steps; the state after a skipped step is valid."""
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    if skipped is None:
        return {"finite": finite}
    return {"finite": finite | skipped, "skipped": skipped.astype(jnp.float32)}


def make_eval_step(loss: LossFunction, *, dtype: Any = None, ema: bool = False) -> Callable[[TrainState, Batch], Stats]:
    """Makes `step(state, batch) -> Stats`, with the loss among its sums; see `evaluate`.

    Args:
        loss: As for `make_train_step`.
        dtype: As for `make_train_step`.
        ema: True evaluates the averages of the parameters (`ema_model`) instead of the parameters.

    Raises:
        ValueError: in a step, for a batch whose rows or sequence do not divide under the active layout; with `ema`, for
            an optimizer without averages.
    """
    bound = bind_options(loss, dtype=dtype)

    def step(state: TrainState, batch: Batch) -> Stats:
        for x in jax.tree.leaves(batch):
            _check_divides(x, 1)
        # A loss with noise draws other noise for every batch, and the same one at every evaluation.
        key = jax.random.fold_in(state.key, _checksum(batch))
        value, stats = bound(ema_model(state) if ema else state.model, jax.tree.map(_by_rows, batch), key)
        _check_metric_names(stats)
        return _everywhere(Stats(stats.num_targets, {"loss": value} | stats.sums))

    return step


def _checksum(batch: Batch) -> Array:
    """Returns a number that tells apart batches of other integers."""
    integers = [x for x in jax.tree.leaves(batch) if jnp.issubdtype(x.dtype, jnp.integer)]
    return sum((jnp.sum(x.astype(jnp.uint32)) for x in integers), start=jnp.zeros((), jnp.uint32))


def _check_metric_names(stats: Stats) -> None:
    """Raises ValueError for metrics of a loss that would replace the step's own."""
    if taken := sorted(_OWN_METRICS & stats.sums.keys()):
        raise ValueError(f"the step itself reports {', '.join(taken)}: give this metric of the loss another name")


def jit_step(step: Step) -> "CompiledStep":
    """Compiles `step` with its state donated: after a call, only the returned state exists.

    Adds the options of XLA that suit the device and the mesh (`xla_flags.automatic`). The mesh is that of the layout
    (or of `jax.set_mesh`) in which the step is called, else that over which its arguments are placed. Flags in the
    environment win.

    Args:
        step: A step from `make_train_step`.

    Returns:
        A function of a state and a batch; like that of `jax.jit`, it has the methods `lower` and `trace`.
    """
    return CompiledStep(step)


class CompiledStep:
    """`jax.jit` of a step, with its state donated, and with the options of XLA that suit the device and the mesh.

    A step is often made outside of `sharding.use` and called inside, or called with arrays that other code has placed.
    So the mesh is looked up at each call: that of the context, else that of the arguments.

    Args:
        step: Function from a state and a batch.
    """

    def __init__(self, step: Any):
        self._step, self._programs = step, {}

    def __call__(self, state: Any, batch: Any) -> Any:
        return self._program(state, batch)(state, batch)

    def lower(self, state: Any, batch: Any) -> jax.stages.Lowered:
        """Lowers the step for arrays, or their shapes and shardings, as `lower` of `jax.jit` does."""
        return self._program(state, batch).lower(state, batch)

    def trace(self, state: Any, batch: Any) -> jax.stages.Traced:
        """Traces the step, as `trace` of `jax.jit` does."""
        return self._program(state, batch).trace(state, batch)

    def _program(self, *arguments: Any) -> Any:
        device, mesh = current_device(), dict(jax.sharding.get_abstract_mesh().shape) or _mesh_of(arguments)
        key = device, *mesh.items()
        if key not in self._programs:
            options = xla_flags.automatic_options(device, mesh)
            self._programs[key] = jax.jit(self._step, donate_argnums=0, compiler_options=options or None)
        return self._programs[key]


def _mesh_of(tree: Any) -> dict[str, int]:
    """Returns the devices along each axis of the mesh over which arrays are placed; nothing without a mesh."""
    for x in jax.tree.leaves(tree):
        if isinstance(place := getattr(x, "sharding", None), NamedSharding):
            return dict(place.mesh.shape)
    return {}


def means(stats: Stats) -> Metrics:
    """Divides a loss's sums by the number of targets, or by their own divisors."""
    return {name: _mean(x, stats.num_targets) for name, x in stats.sums.items()}


def _mean(x: Any, num_targets: Any) -> Array:
    if isinstance(x, MacroMean):
        return jnp.sum(x.sums / divisor(x.counts)) / divisor(jnp.sum(x.counts > 0))
    total, count = x if isinstance(x, Quotient) else (x, num_targets)
    return total / divisor(count)


def num_tokens(batch: Batch) -> Array:
    """Counts the tokens of a batch and its nested batches, without padding."""
    inside = sum((num_tokens(x) for x in batch.values() if isinstance(x, dict)), start=jnp.zeros((), jnp.int32))
    if "tokens" not in batch:
        return inside
    real = jnp.ones(batch["tokens"].shape, bool)
    for name in ("segment_ids", "valid"):
        real = real & (batch[name] != 0) if name in batch else real
    return inside + jnp.sum(real)


def _by_rows(x: Array) -> Array:
    return sharding.constrain(x, *batch_axes(x))


def _check_divides(x: Array, microbatches: int) -> None:
    """Raises ValueError for batches that do not divide over the mesh.

    `constrain` would replicate them (intended for decoding), so every device would compute everything.
    """
    if (layout := sharding.current()) is None:
        return
    stages = layout.mesh_axes("layers")  # stages split the rows if possible
    spec = layout.spec(*batch_axes(x), what="batch")
    for axis, (names, words, rule) in enumerate(zip(spec, ("rows", "tokens"), ("batch", "seq"), strict=False)):
        split = (names,) if isinstance(names, str) else names or ()
        degrees = {name: n for name in split if name not in stages and (n := layout.mesh.shape[name]) > 1}
        count = microbatches if axis == 0 else 1
        if x.shape[axis] % (parts := count * math.prod(degrees.values())):
            times = f", times {count} microbatches" if count > 1 else ""
            raise ValueError(
                f"a batch of shape {x.shape} does not divide over the mesh: its {x.shape[axis]} {words} must be a "
                f"multiple of {parts}, because the rule {rule!r} splits them over {degrees}{times}; change the batch, "
                "the mesh or that rule"
            )


def _everywhere(tree: Any) -> Any:
    """Replicates on every device, so that every host can read it."""
    if sharding.current() is None:
        return tree
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, P()), tree)


def _with_moved_biases(
    rest: Any, trainable: dict[str, Any], counts: Array | None, *, rate: Any, skipped: Bool[Array, ""] | None
) -> Any:
    """Returns `rest` with updated expert biases of trained routers (arXiv:2408.15664).

    Routers of frozen layers, or of the base of an adapter, keep their biases, as they keep their weights.

    Args:
        rest: The parts of the model that are not trained, including the biases.
        trainable: Trained parameters by path.
        counts: How often each expert of each layer was chosen, `L E`; None if the loss does not report it.
        rate: Step size of the biases.
        skipped: True if the step is skipped; None if steps are never skipped.
    """
    paths = _bias_paths(rest, counts)
    trained = [bias for bias in dict.fromkeys(paths) if _trains(bias, rest, trainable)]
    if not trained:
        return rest
    if counts is None or len(counts) != len(paths):
        _warn_without_counts(paths, counts)
        return rest
    new = moved_biases(rest, paths, counts, rate=rate)
    old = {path: nn.variables(rest)[path].get_value() for path in trained}
    new = {path: new[path] if skipped is None else jnp.where(skipped, old[path], new[path]) for path in trained}
    return nn.combine(place_like_parameters(new, new, rest), rest)


def _bias_paths(rest: Any, counts: Array | None) -> list[str]:
    """Lists the biases whose routers report counts; multi-token prediction modules only do so if the loss runs them."""
    frozen = nn.tree.frozen_prefixes(rest)
    paths = [path for path in expert_bias_paths(rest) if not path.startswith(frozen)]
    nodes = jax.tree_util.tree_leaves_with_path(rest, is_leaf=lambda x: isinstance(x, nn.mtp.MTP))
    is_mtp = tuple(
        f"{jax.tree_util.keystr(path, simple=True, separator='.')}." for path, x in nodes if isinstance(x, nn.mtp.MTP)
    )
    if counts is None or len(counts) == len(paths):
        return paths
    return [path for path in paths if not path.startswith(is_mtp)]


def _trains(bias: str, rest: Any, trainable: dict[str, Any]) -> bool:
    """Returns True if the weight of this bias's router is trained, other than through an adapter."""
    router, known = bias.rpartition(".")[0] + ".", nn.variables(rest)
    return any(path.startswith(router) and not isinstance(known[path], nnx.LoRAParam) for path in trainable)


def _warn_without_counts(paths: list[str], counts: Array | None) -> None:
    reported = "none" if counts is None else f"those of {len(counts)} layers"
    warnings.warn(
        f"the model has {len(paths)} expert biases of trained routers, but the loss reports {reported} of their experts' "
        "counts (Stats.expert_counts), so no bias is updated and nothing balances the experts: derive the loss from "
        "training.Loss, or pass router_bias_update_rate=0 and call nn.router.update_router_bias yourself",
        stacklevel=2,
    )
