"""Names of array axes, and the mesh axes to which a rule maps them."""

import dataclasses
import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# Axis name -> meaning. Parameters and activations have separate names, so that a rule can split a weight without
# splitting the activation of the same width.
ARRAY_AXES: dict[str, str] = {
    "embed": "width of the residual stream, in a matrix",
    "vocab": "vocabulary, in the embedding and the head",
    "heads": "query heads, in a projection",
    "kv_heads": "key and value heads, in a projection",
    "head_dim": "width of a head",
    "mlp": "inner width of an MLP, in a matrix",
    "rank": "width of a low-rank latent (MLA)",
    "lora_rank": "rank of an adapter",
    "scale": "groups of a quantized axis with separate scales",
    "expert": "experts, in the matrices of a mixture",
    "expert_embed": "width of the residual stream, in an expert's matrix",
    "router": "experts, as a router scores them",
    "stream": "numbers by which streams of the residual are mixed",
    "label": "numbers that a head gives each token, or components of an embedding",
    "cluster": "clusters of tokens, as a head scores them",
    "norm": "width of a scale or a bias of the residual stream",
    "position": "rows of a table of learned positions",
    "per_layer": "per-layer embeddings of a token, concatenated over layers",
    "vision": "output width of an encoder of images or sound, in the projection to the text model",
    "filter": "output channels of a convolution over an image or a spectrogram",
    "channel": "colour channels of an image, or input channels of a convolution",
    "frame": "frames of a video that share a patch",
    "patch_row": "rows of an image patch",
    "patch_column": "columns of an image patch",
    "tap": "taps of a short convolution",
    "state": "state size: entries of the vectors that write and read a state (Mamba-2)",
    "layers": "layers that a stack repeats; only a `Pipeline` splits them",
    "unstaged_layers": "layers that a stack repeats before or after its pipeline stages; never split",
    # Activations.
    "batch": "rows of a batch",
    "seq": "tokens of a row, between the operations of a layer",
    "q_seq": "tokens of a row, as queries inside attention",
    "kv_seq": "tokens of a row, as keys and values inside attention",
    "act_embed": "width of the residual stream",
    "act_heads": "heads, outside attention",
    "attn_heads": "heads, inside attention",
    "act_mlp": "inner width of an MLP",
    "act_vocab": "vocabulary, in logits",
    "act_expert": "experts to which tokens are sent",
}


@dataclasses.dataclass(frozen=True)
class IfFree:
    """Mesh axes that are used only if they are free.

    In a rule, `IfFree("tensor")` splits an axis over `tensor` unless another axis of the same array (or of the same
    kernel call) uses it, and `("context", IfFree("tensor"))` splits it over `context` in any case. Among the names of
    an array, `IfFree("batch")` is the axis `batch` with lower priority than the other axes.

    Args:
        axes: One or several mesh axes, or the name of an array's axis.
    """

    axes: str | tuple[str, ...]


Name = str | IfFree | None
MeshAxes = str | tuple[str | IfFree, ...] | IfFree | None
AxisRules = Mapping[str, MeshAxes]


def declare_axes(*names: str) -> None:
    """Declares axis names of your own. Call it once, where the module that uses them is defined.

    Declarations are global and permanent for the process. They only decide whether a name is an error, so programs that
    are already traced stay valid, and they are not part of `jit`'s cache key.

    Args:
        names: The new names, such as "state".

    Raises:
        ValueError: when a name is not an identifier.
    """
    for name in names:
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f"the name of an axis must be an identifier, such as 'state'; got {name!r}")
        ARRAY_AXES.setdefault(name, "declared by the program")


def check_axes(names: Iterable[Name], what: str) -> None:
    """Checks that names are declared.

    Args:
        names: Axis names of one array; None is an axis without a name.
        what: Description of the array, for the message.

    Raises:
        ValueError: for a name that is not declared; the message suggests the closest one.
    """
    for name in names:
        name = name.axes if isinstance(name, IfFree) else name
        if name is not None and name not in ARRAY_AXES:
            raise ValueError(f"{what}: no axis is named {name!r}{_suggestion(name)}")


def _suggestion(name: object) -> str:
    close = difflib.get_close_matches(str(name), ARRAY_AXES, 1)
    meant = f"; did you mean {close[0]!r}?" if close else ";"
    return f"{meant} sharding.ARRAY_AXES lists the names, sharding.declare_axes({name!r}) adds one of your own"


def mesh_axes_of(axes: MeshAxes) -> tuple[str, ...]:
    """Returns the mesh axes that a rule names, as a tuple."""
    axes = axes.axes if isinstance(axes, IfFree) else axes
    if axes is None:
        return ()
    if isinstance(axes, str):
        return (axes,)
    return tuple(axis for member in axes for axis in mesh_axes_of(member))


LAYERS = "layers"  # scanned layers, which a `Pipeline` splits into stages
UNSTAGED_LAYERS = "unstaged_layers"  # other scanned layers, which run before or after the stages
_LAYER_AXES = (LAYERS, UNSTAGED_LAYERS)


def is_stacked(axes: Sequence[str | None]) -> bool:
    """Returns True if an array stores several layers, judged by its axis names.

    Args:
        axes: A name (or None) for each dimension.
    """
    return len(axes) > 0 and axes[0] in _LAYER_AXES


def num_layer_axes(axes: Sequence[Any]) -> int:
    """Counts the leading layer axes: 0 for a single layer, 2 for a stack inside a scanned layer.

    Args:
        axes: A name (or None) for each dimension.
    """
    return next((d for d, name in enumerate(axes) if name not in _LAYER_AXES), len(axes))


def own_axes(axes: Sequence[str | None]) -> tuple[str | None, ...]:
    """Returns the names of one layer's own dimensions, `()` if none has a name.

    Args:
        axes: A name (or None) for each dimension, starting with layer axes.
    """
    names = tuple(axes[num_layer_axes(axes) :])
    return names if any(names) else ()
