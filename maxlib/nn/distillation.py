"""Comparisons of two models' predictions on the current mesh, divided by `_head.head_split`.

Shapes: B rows, T tokens, D and E widths, C and G numbers of a hidden state (the first D or E count), V
vocabulary, K candidates.
"""

import jax
from jaxtyping import Array, Bool, Float, Int

from maxlib import ops, sharding
from maxlib.nn.decoder._head import _ROWS, _on_parts, head_split
from maxlib.ops import check_vocabulary

_WIDE = (*_ROWS, None)


def token_divergence(
    hidden: Float[Array, "B T C"],
    head_weight: Float[Array, "V D"],
    teacher_hidden: Float[Array, "B T G"],
    teacher_weight: Float[Array, "U E"],
    where: Bool[Array, "B T"],
    *,
    beta: float = 0.0,
    temperature: float = 1.0,
    softcap: float | None = None,
    teacher_softcap: float | None = None,
) -> Float[Array, "B T"]:
    """Computes `ops.fused_linear_divergence` of the student's next-token distribution from the teacher's.

    Args:
        hidden: The student's `Output.hidden`.
        head_weight: The student's `head_weight()`.
        teacher_hidden: The teacher's `Output.hidden` of the same tokens.
        teacher_weight: The teacher's `head_weight()`.
        where: True for tokens to compare; other tokens get 0.
        beta: 0 for KL(teacher ‖ student), 1 for KL(student ‖ teacher); values between interpolate as in
            `ops.divergence`.
        temperature: Divisor of both models' logits.
        softcap: The student's `softcap`.
        teacher_softcap: The teacher's.

    Raises:
        ValueError: when the vocabularies differ.
    """
    split = head_split(hidden, head_weight.shape)
    options = {"beta": beta, "temperature": temperature, "softcap": softcap, "teacher_softcap": teacher_softcap}

    def op(hidden, weight, teacher_hidden, teacher_weight, where):
        rest = {"where": where, "chunk": split.chunk, "axis_name": split.axis_name}
        return ops.fused_linear_divergence(hidden, weight, teacher_hidden, teacher_weight, **rest, **options)

    check_vocabulary(head_weight, teacher_weight)
    # [B, T, G] -> [B, T, E]: streams of residuals may follow what the head reads.
    teacher_hidden = teacher_hidden[..., : teacher_weight.shape[1]]
    teacher_hidden, teacher_weight = jax.lax.stop_gradient((teacher_hidden, teacher_weight))
    others = teacher_hidden, teacher_weight.astype(teacher_hidden.dtype), where
    names = _WIDE, ("vocab", None), _ROWS
    out = _on_parts(op, split, hidden, head_weight, *others, other_names=names, out_names=_ROWS)
    return sharding.constrain(out, *_ROWS)


def token_gather_log_probs(
    hidden: Float[Array, "B T C"],
    head_weight: Float[Array, "V D"],
    ids: Int[Array, "B T K"],
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
) -> Float[Array, "B T K"]:
    """Computes the log-probabilities of K tokens at each position (`ops.fused_linear_gather_log_probs`).

    Args:
        hidden: The model's `Output.hidden`.
        head_weight: `model.head_weight()`.
        ids: Tokens to look up.
        temperature: Divisor of the logits.
        softcap: `model.softcap`.
    """
    split = head_split(hidden, head_weight.shape)
    options = {"temperature": temperature, "softcap": softcap, "axis_name": split.axis_name, "chunk": split.chunk}

    def op(hidden, weight, ids):
        return ops.fused_linear_gather_log_probs(hidden, weight, ids, **options)

    return _on_parts(op, split, hidden, head_weight, ids, other_names=(_WIDE,), out_names=_WIDE)


def token_top_k(
    hidden: Float[Array, "B T C"],
    head_weight: Float[Array, "V D"],
    k: int,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
) -> tuple[Float[Array, "B T K"], Int[Array, "B T K"]]:
    """Finds the k most likely tokens at each position (`ops.fused_linear_top_k`).

    Args:
        hidden: The model's `Output.hidden`.
        head_weight: `model.head_weight()`.
        k: Number of tokens.
        temperature: Divisor of the logits.
        softcap: `model.softcap`.

    Returns:
        Their log-probabilities in descending order, and their ids.
    """
    split = head_split(hidden, head_weight.shape)
    options = {"temperature": temperature, "softcap": softcap, "axis_name": split.axis_name, "chunk": split.chunk}

    def op(hidden, weight):
        return ops.fused_linear_top_k(hidden, weight, k, **options)

    return _on_parts(op, split, hidden, head_weight, out_names=(_WIDE, _WIDE))
