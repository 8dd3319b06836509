"""Named rematerialisation policies."""

from collections.abc import Callable, Sequence

import jax

Policy = str | Sequence[str] | Callable | None

_NAMED = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


def remat_policy(policy: Policy) -> Callable | None:
    """Turns a name into a `jax.checkpoint` policy.

    None: no rematerialisation. "full": keep only each layer's input. "dots": keep the results of weight matmuls.
    A sequence of names: keep what the layers marked with `checkpoint_name`, of those names. A callable is taken as it is.
    """
    if policy is None or callable(policy):
        return policy
    if isinstance(policy, str):
        if policy not in _NAMED:
            raise ValueError(
                f"remat must be None, one of {sorted(_NAMED)}, a list of checkpoint names or a jax policy; got {policy!r}"
            )
        return _NAMED[policy]
    return jax.checkpoint_policies.save_only_these_names(*policy)
