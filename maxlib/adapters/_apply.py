"""Adds adapters to a model, removes them, and merges them."""

import dataclasses
import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from maxlib import nn
from maxlib.adapters._saved_modules import as_parameters, is_saved, not_trained, trained_whole
from maxlib.nn import sites
from maxlib.nn.matmul import LowRank
from maxlib.nn.sites import Kind


@dataclasses.dataclass(frozen=True)
class LoRA:
    """Low-rank adapter `w + scale * b @ a` (arXiv:2106.09685), with `scale = alpha / rank`.

    Args:
        rank: Rank of the product.
        alpha: Numerator of the scale.
        rslora: True makes the scale `alpha / sqrt(rank)` (arXiv:2312.03732).
        dora: True trains the magnitude of each output's row separately from its direction (arXiv:2402.09353).
        dtype: Dtype of the factors. bfloat16 factors lose small updates.

    Raises:
        ValueError: when rank or alpha is not positive, or `dtype` is not floating.
    """

    rank: int
    alpha: float
    rslora: bool = False
    dora: bool = False
    dtype: Any = jnp.float32

    def __post_init__(self):
        if self.rank < 1 or not self.alpha > 0:
            raise ValueError(f"rank must be at least 1 and alpha positive, got rank={self.rank}, alpha={self.alpha}")
        if not jnp.issubdtype(self.dtype, jnp.floating):
            raise ValueError(f"dtype must be floating, such as jnp.float32, got {self.dtype}")

    @property
    def scale(self) -> float:
        """Returns the factor on the product."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


@dataclasses.dataclass(frozen=True)
class Rule:
    """Gives `adapter` to the layers that the other fields select.

    Args:
        adapter: The adapter; None for no adapter.
        match: Shell pattern on pattern paths ("layers.attn.q").
        layers: Indices of layers in each stack; negative ones count from the end. None for all.
        kinds: Kinds of layers, by default not routers.
    """

    adapter: LoRA | None
    match: str = "*"
    layers: tuple[int, ...] | None = None
    kinds: tuple[Kind, ...] = ("dense", "expert")


Rules = LoRA | Rule | Sequence[Rule]


def as_rules(rules: Rules) -> tuple[Rule, ...]:
    """Returns rules; a single adapter applies to all dense and expert matrices."""
    if isinstance(rules, LoRA):
        return (Rule(rules),)
    rules = (rules,) if isinstance(rules, Rule | str) else tuple(rules)
    if wrong := [rule for rule in rules if not isinstance(rule, Rule)]:
        raise TypeError(f"rules must be a LoRA, such as LoRA(16, alpha=32), or Rules, got {wrong[0]!r:.80}")
    if not any(rule.adapter for rule in rules):
        raise ValueError(f"rules must assign an adapter to something, as LoRA(16, alpha=32) alone does, got {rules}")
    return rules


Model = TypeVar("Model")


def add(model: Model, rules: Rules, *, rngs: nnx.Rngs) -> Model:
    """Returns a model with adapters that initially add zero; weights and their paths do not change.

    A stack whose layers get different adapters gets other groups, so that equal layers are still scanned. Works on
    `jax.eval_shape` of a model, inside `jit`, and on quantized weights (QLoRA, arXiv:2305.14314). Initial values do not
    depend on the grouping: `a` is uniform in ±1/sqrt(inputs), `b` is zero. An `nn.ScoreHead` is trained as a whole.

        tuned = adapters.add(model, adapters.LoRA(rank=8, alpha=16), rngs=nnx.Rngs(0))

    Args:
        model: A model.
        rules: A `LoRA` for all dense and expert matrices, or `Rule`s; the first matching rule applies.
        rngs: Source of initial values; one key is drawn from `params`.

    Raises:
        ValueError: when a rule matches nothing, or a layer cannot have an adapter.
    """
    rules, key = as_rules(rules), nn.draw_key(rngs)
    decide = sites.Decisions(rules, lambda rule: rule.adapter)

    def put(site, lora, path, layers):
        return _with_adapter(site, lora, path, layers, key)

    def change(model):
        return sites.change_sites(model, decide, put)

    is_abstract = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(model))
    new = jax.eval_shape(change, model) if is_abstract else change(model)
    decide.check()
    # A head of scores is new: it is trained as a whole, as PEFT does (`modules_to_save`).
    return trained_whole(new, "head.") if isinstance(getattr(new, "head", None), nn.ScoreHead) else new


def base_model(model: Model) -> Model:
    """Returns the model without its trainable adapters; its arrays are those of `model`, not copies.

    It is the reference policy of a model that started with a new adapter. Adapters and saved modules from `freeze`
    remain.

    Raises:
        ValueError: when there are no trainable adapters: the model would be its own reference; and when modules are
            trained as a whole (`modules_to_save`), whose former weights are gone.
    """
    if not any(trains(site) for _, site in adapted(model)):
        raise ValueError("the model has no trainable adapters to remove, so its base would be the model itself")
    if saved := [path for path, v in nn.variables(model).items() if is_saved(v) and trainable(path, v)]:
        raise ValueError(
            f"{saved[:5]} are trained as a whole (modules_to_save), so `model` no longer has the base's weights: keep the "
            "base beside it (post_training.WithFrozen), or `freeze` the model and `add` a new adapter"
        )
    return _with_matmul(model, lambda matmul: matmul.inner)


def freeze(model: Model) -> Model:
    """Returns a model whose adapters and saved modules, with copied arrays, are no longer trainable.

    They belong to its base: `add` adds new adapters on top of them, and `base_model` only removes the new ones. `save`
    still writes them.
    """

    def fixed(variable: nnx.Variable) -> nnx.Variable:
        if not isinstance(variable, nnx.LoRAParam):
            return variable
        metadata = {name: x for name, x in variable.get_metadata().items() if name in ("axes", "summed", "unnamed")}
        return nnx.Variable(jnp.copy(variable[...]), **metadata)

    return not_trained(_with_matmul(model, lambda matmul: jax.tree.map(fixed, matmul, is_leaf=nn.tree.is_variable)))


def merge(model: Model) -> Model:
    """Returns a model with plain weights `gain * (w + scale * b @ a)`, computed in float32 and cast once.

    Quantized weights become parameters in their original dtype, because rounding them again
    (`quantization.for_inference`) loses part of the adapter.

    Args:
        model: A model with adapters.
    """

    def merge_site(path: str, site: Any) -> Any:
        return nn.stack.map_layers(_merged, site) if levels(site) else site

    return as_parameters(sites.map_sites(model, merge_site))


def trainable(path: str, variable: nnx.Variable) -> bool:
    """Returns True for factors of adapters and modules saved with them: a `Trainer`'s default for adapted models."""
    return isinstance(variable, nnx.LoRAParam)


def adapted(model: Any) -> list[tuple[str, Any]]:
    """Lists the layers that have adapters, with their paths."""
    return [(path, site) for path, site in sites.find(model, sites.SITES) if levels(site)]


def levels(site: Any) -> list[LowRank]:
    """Lists the adapters of a layer: the newest first, then frozen ones."""
    adapters, matmul = [], getattr(site, "matmul", None)  # an embedding has no matmul
    while isinstance(matmul, LowRank):
        adapters.append(matmul)
        matmul = matmul.inner
    return adapters


def make(site: Any, path: str, lora: LoRA, values: Callable[..., tuple[Any, ...]], *args: Any) -> Any:
    """Returns a layer with an adapter whose factors are `values(site, *args)`; `args` also have the layer axis."""
    if isinstance(site, nn.Embed):
        raise ValueError(f"{path}: embeddings and heads have no matmul to adapt; exclude it from the rules")
    if trains(site):
        raise ValueError(f"{path} already has an adapter: `freeze` keeps it below a new one, `merge` writes it into w")
    matmul = nn.stack.map_layers(lambda both: _low_rank(both[0], lora, *values(*both)), (site, *args))
    return sites.replace(site, matmul=matmul)


def trains(site: Any) -> bool:
    """Returns True if a layer has a trainable adapter."""
    return bool(adapters := levels(site)) and isinstance(adapters[0].b, nnx.LoRAParam)


def _with_adapter(site: Any, lora: LoRA, path: str, layers: tuple[int, ...] | None, key: jax.Array) -> Any:
    """Returns a layer with a new adapter, whose random key only depends on its path and index."""
    key = jax.random.fold_in(key, zlib.crc32(path.encode()))
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.asarray(layers or (0,)))
    keys = keys if nn.stack.layer_axis(site) is not None else keys[0]
    return make(site, path, lora, lambda site, key: _initial(site, lora, key), keys)


def _initial(site: Any, lora: LoRA, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the initial factors of an adapter, which adds zero."""
    experts, kept, summed = (tuple(site.w.shape[d] for d in dims) for dims in sites.dimensions(site))
    bound = 1 / math.sqrt(math.prod(summed))
    a = jax.random.uniform(key, (*experts, lora.rank, *summed), jnp.float32, -bound, bound)
    return a.astype(lora.dtype), jnp.zeros((*experts, *kept, lora.rank), lora.dtype)


def _low_rank(site: Any, lora: LoRA, a: Any, b: Any, magnitude: Any = None) -> LowRank:
    """Returns the matmul of one layer with these factors."""
    names = sites.axes_of(site)

    def named(dims):
        return tuple(names[d] for d in dims)

    experts, kept, summed = sites.dimensions(site)
    of_a, of_b = (*named(experts), "lora_rank", *named(summed)), (*named(experts), *named(kept), "lora_rank")
    a, b = nnx.LoRAParam(a, axes=of_a, summed=named(summed)), nnx.LoRAParam(b, axes=of_b, summed=("lora_rank",))
    new = LowRank(site.matmul, a, b, scale=lora.scale, summed=summed, kept=kept, rslora=lora.rslora)
    if not lora.dora:
        return new
    start = new.row_norms(site.w).astype(lora.dtype) if magnitude is None else magnitude
    return sites.replace(new, magnitude=nnx.LoRAParam(start, axes=of_b[:-1]))


def _with_matmul(model: Any, change: Callable[[LowRank], Any]) -> Any:
    """Changes the matmuls that have a trainable adapter."""

    def new(site):
        return sites.replace(site, matmul=change(site.matmul)) if trains(site) else site

    return sites.map_sites(model, lambda _, site: new(site))


def _merged(site: Any) -> Any:
    """Returns one layer with its adapters, trained or frozen, written into its weight."""
    w, inner = site.w, levels(site)[-1].inner
    quantized = isinstance(w, nn.quantized.QuantizedWeight)
    plain = w.restored() if quantized else w
    new = sites.replace(site, w=plain.replace(site.matmul.matrix(w).astype(plain.dtype)), matmul=inner)
    return sites.replace(new, matmul=nn.matmul.PlainMatmul()) if quantized else new
