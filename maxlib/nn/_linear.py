"""Modules that own a matmul weight: every projection in maxlib is an `Einsum`, every token table an `Embed`; and the
feed-forward layers. Shapes: D width of the residual stream, F width of the MLP.
"""

import copyreg
import math
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from maxlib._utils.rows import take_rows
from maxlib._xla_workarounds import for_each_token, gradient_as_stored, multiply_few
from maxlib.hardware import current_device
from maxlib.nn._initial_values import Init, normal, truncated_normal
from maxlib.nn.matmul import LowRank, Matmul, PlainMatmul, merged_einsum
from maxlib.sharding import IfFree, constrain, current
from maxlib.sharding.layers import check_axes, gather_once, gather_rounded


def check_ends(x: Any, letters: str, shape: tuple[int, ...], what: str) -> None:
    """Raises ValueError unless the last axes of `x`, named by `letters`, have the sizes `shape`.

    Shapes are known while tracing, so the compiled program has no check.
    """
    if x.shape[-len(shape) :] != shape:
        wanted = ", ".join(f"{letter}={size}" for letter, size in zip(letters, shape, strict=True))
        # Not the whole shape: `of_same` may have merged the rows.
        got = ", ".join(f"{letter}={size}" for letter, size in zip(letters, x.shape[-len(shape) :], strict=False))
        raise ValueError(
            f"the last axes of x must be {wanted} for {what}, got {got}. Pass an input of the width for which the layer was "
            "built, or build the layer for this width."
        )


def draw_key(rngs: Any) -> Array:
    """Draws the key of one parameter; raises TypeError unless `rngs` is an `nnx.Rngs`."""
    if not isinstance(rngs, nnx.Rngs):
        raise TypeError(
            f"rngs must be an nnx.Rngs, got {type(rngs).__name__} {rngs!r:.40}; nnx.Rngs(0) makes one from a seed"
        )
    stream = rngs.params
    key = jax.random.fold_in(stream.key.get_value(), stream.count.get_value())
    # `stream()` would ask the traced count for its sharding. jax then formats an error message with all operations so
    # far, which took half of the time to build a model.
    stream.count.set_raw_value(stream.count.get_value() + 1)
    return key


class Einsum(nnx.Module):
    """Linear layer `einsum(spec, x, w)`, plus a bias over the axes of `w` that are in the output.

    Args:
        spec: Einsum of input and weight, such as `"...D,FD->...F"`.
        shape: Sizes of the dimensions of `w`.
        axes: Names of the dimensions of `w`, as sharding rules use them.
        bias: True adds a bias.
        gather_once: True all-gathers the weight once and reuses it for recomputation and the backward pass
            (`sharding.layers.gather_once`). Use it for small weights at the beginning of a layer, where the two uses
            are far apart. It only matters under FSDP.
        init: Initializer, by default truncated normal with variance 1 / fan-in; the fan-in is the product of the
            dimensions that the einsum sums over.
        rngs: Source of initial values.

    Raises:
        ValueError: when `spec`, `shape` and `axes` do not describe the same dimensions, or an axis name is not declared
            (`sharding.declare_axes`).

    Attributes:
        matmul: Multiplies; `maxlib.quantization` replaces it.
    """

    def __init__(
        self,
        spec: str,
        shape: tuple[int, ...],
        axes: tuple[str, ...],
        *,
        bias: bool = False,
        gather_once: bool = False,
        init: Init | None = None,
        rngs: nnx.Rngs,
    ):
        letters, out = _weight_letters(spec, shape, axes)
        check_axes(axes, f"Einsum({spec!r})")
        # Dimensions of w in the output (fan-out; those of the bias), and dimensions that are summed over (fan-in).
        outputs = [d for d, letter in enumerate(letters) if letter in out]
        summed = [d for d, letter in enumerate(letters) if letter not in out]
        if init is None:
            init = nnx.initializers.variance_scaling(
                1.0, "fan_in", "truncated_normal", in_axis=summed, out_axis=outputs
            )
            init = truncated_normal(math.prod(shape[d] for d in summed), init)
        self.spec, self.gather_once = spec, gather_once
        self.matmul: Matmul = PlainMatmul()
        self.w = nnx.Param(init(draw_key(rngs), shape, jnp.float32), axes=axes, summed=tuple(axes[d] for d in summed))
        if bias:
            self.b = nnx.Param(jnp.zeros([shape[d] for d in outputs]), axes=tuple(axes[d] for d in outputs))
        else:
            self.b = None

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Returns the projection of `x`, in the dtype of `x`."""
        self._check(x)
        # For "...D,NHD->...NH": [..., D] -> [..., N, H]
        if self._gathers_rounded(x):
            # Inside `jax.checkpoint` no device keeps the gathered weight for the backward pass.
            y = jax.checkpoint(self._multiply_rounded, prevent_cse=False)(x, self.w[...])
        else:
            w = self._gathered(x) if self.gather_once else self.w
            y = merged_einsum(self.matmul.einsum, self.spec, x, w, rows=_merges_rows())
        if self.b is None:
            return y
        # [kept dimensions] -> [..., kept dimensions], in the dtype of the activations.
        b = jnp.asarray(self.b[...], x.dtype)
        return y + for_each_token(b, y.shape)

    def product(self, spec: str, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Multiplies `x` by the weight under another spec, without the bias, in the dtype of `x`."""
        matmul = self.matmul.unquantized() if isinstance(self.matmul, LowRank) else PlainMatmul()
        return matmul.einsum(spec, x, self.w)

    def _gathers_rounded(self, x: Float[Array, "..."]) -> bool:
        """Returns True if the layout gathers this weight in 8 bits."""
        layout = current()
        return layout is not None and layout.gather_dtype is not None and self._is_gathered(x)

    def _multiply_rounded(self, x: Float[Array, "..."], w: Array) -> Float[Array, "..."]:
        w = gather_rounded(w, *self.w.get_metadata()["axes"], dtype=x.dtype)
        return self.matmul.einsum(self.spec, x, w)

    def _is_gathered(self, x: Float[Array, "..."]) -> bool:
        """Returns False if the weight is quantized or there is a single token, whose activations are smaller."""
        return isinstance(self.w, nnx.Param) and x.shape[1:-1] != (1,)

    def _gathered(self, x: Float[Array, "..."]) -> Any:
        """Gathers the weight once for all its uses, where that moves less than the activations."""
        if not self._is_gathered(x):
            return self.w
        return gather_once(jnp.asarray(self.w[...], x.dtype), *self.w.get_metadata()["axes"])

    def _check(self, x: Float[Array, "..."]) -> None:
        """Raises ValueError if the last axes of `x` do not fit the weight."""
        # "...D,NHD->...NH": the last axis of x is D and must have the size of D in w.
        of_x, of_w = self.spec.partition("->")[0].split(",")
        letters, sizes = of_x.removeprefix("..."), dict(zip(of_w, self.w.shape, strict=True))
        if sizes.keys() >= set(letters):
            check_ends(x, letters, tuple(sizes[letter] for letter in letters), f"the weight of {self.spec!r}")


def of_same(x: Float[Array, "... D"], *layers: Callable[[Array], Array]) -> list[Float[Array, "..."]]:
    """Returns `layer(x)` for each layer; a layer maps the last axis.

    Where layers merge the rows of `x`, they are merged once. Otherwise a loop over blocks would keep a copy for the
    backward pass of each layer.
    """
    if x.ndim < 3 or not _merges_rows():
        return [layer(x) for layer in layers]
    # [B, T, D] -> [B * T, D]
    rows = x.reshape(-1, x.shape[-1])
    # [B * T, N, H] -> [B, T, N, H], for example
    return [y.reshape(*x.shape[:-1], *y.shape[1:]) for y in (layer(rows) for layer in layers)]


def _merges_rows() -> bool:
    """Returns True on a single CPU device, where batch and sequence become one dimension of rows.

    The weight's gradient then sums over this dimension alone. XLA for CPUs copies and transposes both operands of a sum
    over two dimensions.
    """
    return current() is None and current_device()[0] == "cpu"


def _weight_letters(spec: str, shape: tuple[int, ...], axes: tuple[str, ...]) -> tuple[str, str]:
    """Returns the letters of the weight and of the output."""
    inputs, _, out = spec.partition("->")
    letters = inputs.partition(",")[2]
    if not letters or not len(letters) == len(shape) == len(axes):
        raise ValueError(
            f"spec must read 'x,w->y' with one letter, size and axis name per dimension of w; "
            f"got spec {spec!r}, shape {shape}, axes {axes}"
        )
    return letters, out


def check_ids(tokens: Any, vocab: int) -> None:
    """Raises ValueError for an id that is not in `[0, vocab)`, if the ids are concrete and all on this host."""
    if isinstance(tokens, Tracer) or not getattr(tokens, "is_fully_addressable", True):
        return
    ids = np.asarray(tokens)
    if (bad := ids[(ids < 0) | (ids >= vocab)]).size:
        raise ValueError(
            f"tokens must be in [0, {vocab}), got {bad[0]}: is this the model's tokenizer? Padding takes any id in that "
            "range, such as 0"
        )


class Embed(nnx.Module):
    """Table of token vectors. `logits` multiplies by the same table, so a model with tied embeddings needs only one.

    Args:
        vocab: Number V of tokens.
        dim: Width D of a vector.
        init: Initializer, by default normal with standard deviation 0.02.
        rngs: Source of initial values.
    """

    def __init__(self, vocab: int, dim: int, *, init: Init | None = None, rngs: nnx.Rngs):
        init = normal(0.02) if init is None else init
        self.w = nnx.Param(init(draw_key(rngs), (vocab, dim), jnp.float32), axes=("vocab", "embed"))

    def __call__(self, tokens: Int[Array, "..."], *, dtype=jnp.bfloat16) -> Float[Array, "... D"]:
        """Returns the vectors of token ids in `dtype`.

        Ids must be in `[0, vocab)`. Inside jit their values are unknown: there any other id gives NaN.

        Raises:
          ValueError: outside of jit, for an id that is not in the table.
        """
        check_ids(tokens, self.w.shape[0])
        if tokens.ndim != 2:
            return jnp.asarray(take_rows(self.w[...], tokens), dtype)
        # Devices that hold different parts of the width look up rows for each other, then exchange rows for width. So
        # neither the table nor its gradient is ever gathered.
        names = IfFree("batch"), IfFree("seq"), "embed"
        # [B, T] -> [B, T, 1] and back: `IfFree` needs the width's axis to know which mesh axes are taken.
        tokens = constrain(tokens[..., None], *names)[..., 0]
        layout = current()
        parts = (1, 1) if layout is None else (layout.axis_size("vocab"), layout.axis_size("embed"))
        table = gradient_as_stored(self.w[...], parts)
        return constrain(jnp.asarray(take_rows(table, tokens), dtype), *names)

    def logits(self, x: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """Returns the scores of all tokens in float32, whatever the dtype of `x`."""
        check_ends(x, "D", self.w.shape[1:], "the embedding")
        # [..., D] -> [..., V]. The products are in the dtype of x, their sum in float32.
        w = jnp.asarray(self.w[...], x.dtype)
        if x.dtype == jnp.float32 and current() is None:
            return multiply_few(x.reshape(-1, x.shape[-1]), w).reshape(*x.shape[:-1], -1)
        return jnp.einsum("...D,VD->...V", x, w, preferred_element_type=jnp.float32)


def _constrain_hidden(h: Float[Array, "... F"]) -> Float[Array, "... F"]:
    """Splits hidden activations `B T F` over the mesh by the rule `act_mlp`."""
    return constrain(h, "batch", "seq", "act_mlp") if h.ndim == 3 else h


def check_act(act: Any) -> Callable:
    """Returns the activation; raises TypeError for one that is not a function, such as its name."""
    if not callable(act):
        raise TypeError(f"act must be a function, such as jax.nn.gelu, got {act!r:.80}")
    return act


def _by_name(function: Any) -> Any:
    """Pickles a function of a module by its name, as Python does those that are not wrapped; any other as usual."""
    name = getattr(function, "__qualname__", "")
    return name if getattr(sys.modules.get(function.__module__), name, None) is function else function.__reduce_ex__(4)


# Otherwise no model with `jax.nn.silu` pickles, and a deep copy is of another structure.
for _function in (jax.nn.silu, jax.nn.relu):
    copyreg.pickle(type(_function), _by_name)


class GatedMLP(nnx.Module):
    """Gated MLP `down(act(gate(x)) * up(x))` (Shazeer 2020, arXiv:2002.05202): SwiGLU with silu, GeGLU with gelu.

        mlp = nn.GatedMLP(64, 256, rngs=nnx.Rngs(0))
        y = mlp(jnp.ones((2, 8, 64)))  # B T D

    Args:
        dim: Width D of input and output.
        mlp_dim: Hidden width F.
        act: Activation of the gate, such as `jax.nn.gelu`.
        bias: True adds biases to all three projections.
        limit: Clips the gate from above, and up to `[-limit, limit]` (DeepSeek V4); None for no limit.
        rngs: Source of initial values.

    Raises:
        TypeError: when `act` is not a function.
    """

    def __init__(
        self,
        dim: int,
        mlp_dim: int,
        *,
        act: Callable = jax.nn.silu,
        bias: bool = False,
        limit: float | None = None,
        rngs: nnx.Rngs,
    ):
        self.gate = Einsum("...D,FD->...F", (mlp_dim, dim), ("mlp", "embed"), bias=bias, rngs=rngs)
        self.up = Einsum("...D,FD->...F", (mlp_dim, dim), ("mlp", "embed"), bias=bias, rngs=rngs)
        self.down = Einsum("...F,DF->...D", (dim, mlp_dim), ("embed", "mlp"), bias=bias, rngs=rngs)
        self.act, self.limit = check_act(act), limit

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Applies the layer to each token."""
        # [..., D] -> [..., F] twice. Remat policies know both by name.
        gate, up = of_same(x, self.gate, self.up)
        gate, up = checkpoint_name(gate, "gate"), checkpoint_name(up, "up")
        # The hidden values are cheap to compute again. With `down` in the checkpoint, its gradient does not keep them
        # either. Its matmul is not computed again, because the backward pass does not need the result.
        return jax.checkpoint(self._down, prevent_cse=False)(gate, up)

    def _down(self, gate: Float[Array, "... F"], up: Float[Array, "... F"]) -> Float[Array, "... D"]:
        if self.limit is not None:
            gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        # [..., F] -> [..., D]
        return self.down(_constrain_hidden(self.act(gate) * up))


class MLP(nnx.Module):
    """MLP `down(act(up(x)))`.

        mlp = nn.MLP(64, 256, act=jax.nn.gelu, rngs=nnx.Rngs(0))
        y = mlp(jnp.ones((2, 8, 64)))  # B T D

    Args:
        dim: Width D of input and output.
        mlp_dim: Hidden width F.
        act: Activation, such as `jax.nn.silu`.
        bias: True adds biases to both projections.
        rngs: Source of initial values.

    Raises:
        TypeError: when `act` is not a function.
    """

    def __init__(self, dim: int, mlp_dim: int, *, act: Callable = jax.nn.gelu, bias: bool = True, rngs: nnx.Rngs):
        self.up = Einsum("...D,FD->...F", (mlp_dim, dim), ("mlp", "embed"), bias=bias, rngs=rngs)
        self.down = Einsum("...F,DF->...D", (dim, mlp_dim), ("embed", "mlp"), bias=bias, rngs=rngs)
        self.act = check_act(act)

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Applies the layer to each token."""
        # [..., D] -> [..., F] -> [..., D]
        return self.down(_constrain_hidden(self.act(checkpoint_name(self.up(x), "up"))))
