"""Rematerialization: which values of a layer's forward pass are kept for the backward pass, recomputed, or
offloaded.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float

Policy = str | Sequence[str] | Mapping[str, str] | Callable | None

ATTENTION = ("attention_out", "attention_lse")
QKV = ("q", "k", "v")
HIDDEN = ("gate", "up")
# Names that maxlib's layers mark with `checkpoint_name`; a layer of your own may mark more.
INTERMEDIATES = (*QKV, "latent", *ATTENTION, "attn", "cross_attn", *HIDDEN, "expert_gate", "expert_up", "moe", "mlp")
# The sum of a token's experts. All policies by name keep it: only a few families' gradients need it (those of a norm or
# a projection behind the experts), and to recompute it is to send tokens to their experts a third time.
MOE = {"moe": "keep"}

POLICIES: Mapping[str, Any] = {
    "full": MOE,
    "attention": MOE | dict.fromkeys(ATTENTION, "keep"),
    "qkv": MOE | dict.fromkeys(QKV, "keep"),
    "qkv_offload": MOE | dict.fromkeys(QKV, "offload"),
    "dots_except_mlp": MOE | dict.fromkeys((*QKV, "latent", "attn", "cross_attn", "mlp"), "keep"),
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable, jax.checkpoint_policies.save_only_these_names(*MOE)
    ),
    "minimal": dict.fromkeys(INTERMEDIATES, "keep"),
    "minimal_offload": MOE | dict.fromkeys((*QKV, "latent", "attn", "cross_attn", *HIDDEN, "mlp"), "offload"),
}


def remat_policy(policy: Policy) -> Callable | None:
    """Turns the `remat` argument of a model into a `jax.checkpoint` policy.

    Args:
        policy: None (no rematerialization); a name of `POLICIES`, of which "full" keeps each layer's input
            and, where gradients need it, "moe"; a mapping from names of `INTERMEDIATES` (or your own) to "keep",
            "offload" (to the host's memory) or "recompute", the default for names that are absent; a sequence of names
            to keep; or a `jax.checkpoint` policy.

    Raises:
        ValueError: when a name or a choice is unknown.
    """
    if policy is None or callable(policy):
        return policy
    if isinstance(policy, str):
        if policy not in POLICIES:
            raise ValueError(
                f"remat must be None, one of {sorted(POLICIES)}, names to keep, a mapping from names to 'keep', 'offload' or "
                f"'recompute', or a jax policy; got {policy!r}"
            )
        return remat_policy(POLICIES[policy])
    return _named(policy if isinstance(policy, Mapping) else dict.fromkeys(policy, "keep"))


def kept_on_device(policy: Policy) -> Policy:
    """Returns the policy with offloaded values recomputed instead: those that stay in device memory."""
    known = POLICIES.get(policy) if isinstance(policy, str) else policy
    if not isinstance(known, Mapping):
        return policy
    return {name: "recompute" if choice == "offload" else choice for name, choice in known.items()}


def _named(choices: Mapping[str, str]) -> Callable:
    """Makes the policy of a mapping from names to choices."""
    if unknown := {name: choice for name, choice in choices.items() if choice not in ("keep", "offload", "recompute")}:
        raise ValueError(f"remat must say 'keep', 'offload' or 'recompute' for a name; got {unknown}")
    # "recompute" needs no list: names in neither list are recomputed.
    saved = [name for name, choice in choices.items() if choice == "keep"]
    offloaded = [name for name, choice in choices.items() if choice == "offload"]
    if not offloaded:
        return jax.checkpoint_policies.save_only_these_names(*saved)
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=saved,
        names_which_can_be_offloaded=offloaded,
        offload_src="device",
        offload_dst="pinned_host",
    )
    return _Offloading(policy, frozenset(offloaded))


@dataclasses.dataclass(frozen=True)
class _Offloading:
    """A `jax.checkpoint` policy that offloads the values with some names to the host."""

    policy: Callable
    names: frozenset[str]

    def __call__(self, *args: Any, **params: Any) -> Any:
        return self.policy(*args, **params)


# Part of jit's cache key, which a plain context variable would not be.
_offloaded = jax.make_user_context(frozenset())


def rematerialised(fn: Callable, policy: Callable, *, prevent_cse: bool | tuple[bool, ...]) -> Callable:
    """Returns `jax.checkpoint(fn)`; `mark_heads` inside it knows which names are offloaded."""

    def run(*args: Any) -> Any:
        with _offloaded(policy.names if isinstance(policy, _Offloading) else frozenset()):
            return fn(*args)

    return jax.checkpoint(run, policy=policy, prevent_cse=prevent_cse)


def mark_heads(x: Float[Array, "B T N H"], name: str) -> Float[Array, "B T N H"]:
    """Names a value for remat policies (`checkpoint_name`), and stores offloaded values head by head.

    Otherwise the TPU compiler may choose different layouts for the forward and backward passes, and copy the values of
    all layers to the device at once to transpose them.
    """
    if name not in _offloaded.value:
        return checkpoint_name(x, name)
    # [B, T, N, H], stored as B N T H
    layout = Layout(major_to_minor=(0, 2, 1, 3))
    return with_layout_constraint(checkpoint_name(with_layout_constraint(x, layout), name), layout)
