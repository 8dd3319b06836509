"""Heads of encoders: for masked tokens, or for classes of whole sequences."""

from collections.abc import Callable
from typing import Any

from flax import nnx
from jaxtyping import Array, Float

from maxlib import nn
from maxlib.weights import Computed, HFConfig


class Transform(nnx.Module):
    """What an encoder computes before its head: `norm(act(dense(x)))`.

    Args:
        dim: Width D.
        act: Activation.
        norm: Norm of the result; None for none.
        bias: True adds a bias to `dense`.
        rngs: Source of initial values.
    """

    def __init__(
        self,
        dim: int,
        act: Callable,
        *,
        norm: nnx.Module | None = None,
        bias: bool = True,
        rngs: nnx.Rngs,
    ):
        self.norm, self.act = norm, act
        self.dense = nn.Einsum("...D,ED->...E", (dim, dim), ("mlp", "embed"), bias=bias, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Applies it to each token."""
        h = self.act(self.dense(x))
        return h if self.norm is None else self.norm(h)


class EncoderLM(nn.Decoder):
    """Base class of encoders with a head over the vocabulary, or over classes.

    The targets of `NextToken` are the tokens behind masks; or, for classes, the class of a document at its first token;
    and -1 elsewhere.

    A subclass makes `head` for classes, or leaves it None for a head tied to `embed`, and `head_bias`.
    """

    has_cache = False


def labels(architecture: str | Callable[[Any], str]) -> Computed:
    """Makes the entry for the names of classes, None for a model with a head over the vocabulary.

    Args:
        architecture: The class in transformers of a model with classes, or a function from a configuration to it.
    """

    def read(hf: HFConfig, c: Any) -> tuple[str, ...] | None:
        classes = hf.take("architectures", None, kind=list) or []
        if not any(name.endswith("ForSequenceClassification") for name in classes):
            return None
        names = hf.take("id2label", None, kind=dict) or {"0": "LABEL_0", "1": "LABEL_1"}
        return tuple(names[number] for number in sorted(names, key=int))

    def write(value: tuple[str, ...] | None, cfg: Any) -> dict[str, Any]:
        if value is None:
            return {}
        name = architecture(cfg) if callable(architecture) else architecture
        return {
            "architectures": [name],
            "id2label": {str(i): label for i, label in enumerate(value)},
            "label2id": {label: i for i, label in enumerate(value)},
        }

    return Computed("labels", read, write)
