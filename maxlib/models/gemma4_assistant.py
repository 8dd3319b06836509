"""Drafters of Gemma 4 (Google DeepMind 2026): small models that guess tokens ahead from another model's last keys.

A drafter has no keys, and so no cache. It takes those of the last layer of either type of its target, a
`gemma4.Gemma4`, and the target's last hidden state: `inference.LocalEngine(target, num_drafts=4, drafter=drafter)`.

Shapes: B rows, T tokens, N drafts, S keys, D width, E width of the target, V vocabulary, C clusters, K chosen ones.
"""

import dataclasses
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from maxlib import nn
from maxlib.models import _gemma4_config as gemma4_config
from maxlib.models import gemma4
from maxlib.models.gemma4 import LOCAL
from maxlib.weights import Computed, Family, Field, Fields, Multimodal, Table, Weight, names


@dataclass(frozen=True, kw_only=True)
class Drafting:
    """What a drafter has besides its layers."""

    unified: bool = False  # it drafts for the 12B model
    target_dim: int = 1536
    clustered: bool = False  # only the likeliest clusters of tokens are scored
    num_clusters: int = 2048
    top_clusters: int = 32


@dataclass(frozen=True, kw_only=True)
class Config(gemma4.Config):
    """Sizes of a drafter: those of a Gemma 4 in which every layer takes keys, and what `Drafting` says."""

    drafting: Drafting = Drafting()

    def __post_init__(self):
        if self.num_shared == 0:  # which transformers takes for all
            object.__setattr__(self, "num_shared", self.num_layers)
        super().__post_init__()
        without = {"enable_moe_block": self.sparse, "hidden_size_per_layer_input": self.per_layer_dim}
        without |= {"use_double_wide_mlp": self.shared_wide, "vision_config": self.vision}
        if wrong := [name for name, value in without.items() if value]:
            raise ValueError(f"a drafter has no {wrong[0]}, got {without[wrong[0]]!r}")
        if self.drafting.clustered and self.vocab % self.drafting.num_clusters:
            got = f"{self.vocab} and {self.drafting.num_clusters}"
            raise ValueError(f"num_centroids must divide vocab_size into clusters of equal size, got {got}")

    def _check_shared(self) -> None:
        if self.num_shared != self.num_layers:
            got = f"{self.num_shared} of {self.num_layers}"
            raise ValueError(f"every layer of a drafter takes keys (num_kv_shared_layers), got {got}")


class ClusteredHead(nnx.Module):
    """Scores of the tokens in the likeliest clusters, each of which has a centroid.

    Args:
        vocab: Number V of tokens.
        dim: Width D.
        num_clusters: Number C of clusters, all of V / C tokens.
        top: Number K of clusters that are scored.
        rngs: Source of initial values.
    """

    def __init__(self, vocab: int, dim: int, num_clusters: int, top: int, *, rngs: nnx.Rngs):
        self.centroids = nn.Einsum("...D,CD->...C", (num_clusters, dim), ("cluster", "embed"), rngs=rngs)
        # Ids cluster after cluster: stored, but not trained.
        self.ids = nnx.Variable(jnp.arange(vocab, dtype=jnp.int32), axes=(None,))
        self.top = top

    def __call__(self, hidden: Float[Array, "B T D"], weight: Float[Array, "V D"]) -> Float[Array, "B T V"]:
        """Returns the scores; tokens of all other clusters get one less than the lowest.

        Args:
            hidden: Hidden states.
            weight: The matrix of the head.
        """
        clusters = jax.lax.top_k(self.centroids(hidden), self.top)[1]
        ids = self.ids[...].reshape(self.centroids.w.shape[0], -1)
        # [B, T, K] -> [B, T, K, V / C] -> [B, T, K V / C]
        ids = ids[clusters].reshape(*hidden.shape[:2], -1)
        scores = jnp.einsum("BTD,BTID->BTI", hidden, jnp.asarray(weight[ids], hidden.dtype),
                            preferred_element_type=jnp.float32)  # fmt: skip
        floor = jnp.full((*hidden.shape[:2], weight.shape[0]), scores.min() - 1)
        return jnp.put_along_axis(floor, ids, scores, axis=-1, inplace=False)


class Gemma4Assistant(nnx.Module):
    """Drafter of a Gemma 4: it guesses a token from the one before, the target's hidden state there, and its last keys.

    For the guess after that, its own output takes the place of the target's hidden state. Keys and position stay.
    """

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.cfg, E, D = cfg, cfg.drafting.target_dim, cfg.dim
        self.enter = nn.Einsum("...F,DF->...D", (D, 2 * E), ("embed", "mlp"), rngs=rngs)
        self.embed = nn.Embed(cfg.vocab, D, rngs=rngs)
        self.layers = nn.Stack(lambda kind, rngs: gemma4.Block(cfg, *kind, rngs=rngs), cfg.kinds, rngs=rngs)
        self.norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        self.leave = nn.Einsum("...D,ED->...E", (E, D), ("mlp", "embed"), rngs=rngs)
        self.head = None if cfg.tied else nn.Embed(cfg.vocab, D, rngs=rngs)
        clusters = cfg.drafting.num_clusters, cfg.drafting.top_clusters
        self.clusters = ClusteredHead(cfg.vocab, D, *clusters, rngs=rngs) if cfg.drafting.clustered else None

    def __call__(
        self,
        embedded: Float[Array, "B 1 E"],
        hidden: Float[Array, "B 1 E"],
        keys: dict[str, nn.cache.SharedKV],
        position: Int[Array, " B"],
    ) -> tuple[Float[Array, "B 1 V"], Float[Array, "B 1 E"]]:
        """Scores the next token.

        Args:
            embedded: The target's vector of the last token.
            hidden: The target's hidden state at the token before it, or that of an earlier guess.
            keys: The target's keys by type (`target_keys`).
            position: Position of the first guess's last token.

        Returns:
            The scores, and the hidden state for the next guess.
        """
        ropes = tuple(rope for _, rope, _ in self.cfg.parts.values())
        ctx = nn.make_context(*embedded.shape[:2], positions=position[:, None], ropes=ropes)
        x = self.enter(jnp.concatenate([embedded, hidden], axis=-1))
        x, _, _ = self.layers(nn.stack.Carry(x, keys), ctx)
        x = self.norm(x.x)
        head = self.head or self.embed
        logits = head.logits(x) if self.clusters is None else self.clusters(x, head.w[...])
        return logits, self.leave(x)

    def draft(
        self,
        target: gemma4.Gemma4,
        hidden: Float[Array, "B 1 E"],
        token: Int[Array, " B"],
        cache: nn.cache.Cache,
        *,
        count: int,
    ) -> Int[Array, "B N"]:
        """Returns `count` guesses of the tokens after `token`, as `nn.mtp.Drafter` asks for."""
        keys = self.target_keys(target, cache, hidden.dtype)

        def guess(state, _):
            token, hidden = state
            logits, hidden = self(target.embed_tokens(token[:, None], hidden.dtype), hidden, keys, cache.length)
            token = jnp.argmax(logits[:, 0], axis=-1).astype(jnp.int32)
            return (token, hidden), token

        _, drafts = jax.lax.scan(guess, (token, hidden), length=count)
        return drafts.T  # [N, B] -> [B, N]

    def target_keys(self, target: gemma4.Gemma4, cache: nn.cache.Cache, dtype: Any) -> dict[str, nn.cache.SharedKV]:
        """Returns the target's last keys and values by type, with the bounds within which a guess attends to them.

        Args:
            target: The model that is drafted for.
            cache: Its cache.
            dtype: Dtype of the computation.
        """
        stop, keys = cache.length[:, None], {}  # [B, 1]
        for kind, (k, v, shift) in target.last_keys(cache).items():
            # A guess sees a window's keys and one more: transformers counts from the token before it, both ends in.
            start = jnp.maximum(stop - self.cfg.window - 1, 0) if kind == LOCAL else jnp.zeros_like(stop)
            bounds = start + shift[:, None], stop + shift[:, None]
            keys[kind] = nn.cache.SharedKV(k.astype(dtype), v.astype(dtype), *bounds)
        return keys

    def check_target(self, target: Any) -> None:
        """Raises ValueError for a model that this one does not draft for: another family, width, vocabulary, or other
        keys.
        """
        if not isinstance(target, gemma4.Gemma4):
            raise ValueError(f"this drafter is for a Gemma4, got {type(target).__name__}")
        wanted, actual = _interface(self.cfg, self.cfg.drafting.target_dim), _interface(target.cfg, target.cfg.dim)
        if wrong := [name for name in wanted if wanted[name] != actual.get(name)]:
            raise ValueError(
                f"the drafter is for another model: its {wrong[0]} is {wanted[wrong[0]]}, the model's "
                f"{actual.get(wrong[0])}; take the drafter of this size"
            )


def _interface(cfg: gemma4.Config, width: int) -> dict[str, Any]:
    """Returns what a drafter and its target must have in common."""
    common: dict[str, Any] = {"target_dim (backbone_hidden_size)": width, "vocab (vocab_size)": cfg.vocab}
    for kind in sorted({*cfg.types}):
        _, rope, heads = cfg.parts[kind]
        common[f"width and number of key heads ({kind})"] = heads
        common[f"rope ({kind})"] = dataclasses.replace(rope, max_length=None)
    return common | ({"window (sliding_window)": cfg.window} if LOCAL in cfg.types else {})


def _table(cfg: Config) -> Table:
    layer = [*names.SANDWICH_NORMS, *names.ATTENTION, *names.MLP, Weight("layer_scalar", "factor")]
    return [
        *names.decoder_table(layer),
        Weight("pre_projection.weight", "enter.w"),
        Weight("post_projection.weight", "leave.w"),
        Weight("masked_embedding.centroids.weight", "clusters.centroids.w"),
        Weight("masked_embedding.token_ordering", "clusters.ids"),
    ]


UNIFIED = "gemma4_unified_assistant"
DRAFTING = Fields(
    Drafting,
    [
        Computed("unified", lambda hf, c: hf.take("model_type") == UNIFIED, lambda unified, cfg: {}),
        Field("target_dim", "backbone_hidden_size"),
        Field("clustered", "use_ordered_embeddings"),
        Field("num_clusters", "num_centroids"),
        Field("top_clusters", "centroid_intermediate_top_k"),
    ],
    absent={"target_dim": lambda c: 3840 if c.unified else 1536},
)
FIELDS = Multimodal(
    replace(
        gemma4_config.TEXT,
        config=Config,
        model_type=lambda cfg: "gemma4_unified_text" if cfg.drafting.unified else "gemma4_text",
    ),
    {"drafting": DRAFTING},
    model_types={"gemma4_assistant": "Gemma4AssistantForCausalLM", UNIFIED: "Gemma4UnifiedAssistantForCausalLM"},
    model_type=lambda cfg: UNIFIED if cfg.drafting.unified else "gemma4_assistant",
    ignored=[  # of processors, in drafters' configs too
        *(f"{name}_token_id" for name in ("image", "video", "audio", "boi", "eoi", "boa", "eoa")),
        *("eoa_token_index", "boa_token_index"),
    ],
    tied=True,
    text_alone=False,
)
# Without presets: a drafter is no model that one trains or plans by itself.
FAMILY = Family("gemma4_assistant", Gemma4Assistant, FIELDS, _table)
