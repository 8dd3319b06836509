"""Checks of arguments: arrays, dtypes, and options with a few allowed values."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def check_choice(name: str, value: Any, choices: Sequence[Any], why: str = "") -> None:
    """Raises ValueError unless `value` is one of `choices`.

    Args:
        name: Name of the option.
        value: Its value.
        choices: The allowed values.
        why: Explanation to append to the error.
    """
    if value not in choices:
        listed = ", ".join(map(repr, choices[:-1]))
        raise ValueError(f"{name} must be {listed} or {choices[-1]!r}, got {value!r}{why and '; ' + why}")


_SHORT = {
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp64": "float64",
    "fp8": "float8_e4m3fn",
    "half": "float16",
}


def check_array(x: Any, name: str) -> None:
    """Raises TypeError unless `x` is an array of jax or numpy; the message says how to make one."""
    if isinstance(x, jax.Array | np.ndarray | np.generic):
        return
    kind = type(x)
    if kind.__module__.partition(".")[0] == "torch":
        raise TypeError(f"{name} must be an array of jax or numpy, got a torch {kind.__name__}: pass {name}.numpy()")
    raise TypeError(f"{name} must be an array of jax or numpy, got {kind.__name__}: pass np.asarray({name})")


def check_dtype(dtype: Any) -> None:
    """Raises TypeError for what is no floating dtype, such as "fp32" or "int8"; None passes."""
    try:
        is_float = jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:
        meant = _SHORT.get(str(dtype).removeprefix("torch."), str(dtype).removeprefix("torch."))
        hint = f'; did you mean "{meant}"?' if meant != str(dtype) else ""
        raise TypeError(f'dtype must be one of jax, such as jnp.float32 or "bfloat16", got {dtype!r}{hint}') from None
    if not is_float:  # weights cast to whole numbers would be 0
        raise TypeError(
            f"dtype must be floating, such as jnp.bfloat16, got {jnp.dtype(dtype).name}: for weights of few bits use "
            "quantization.for_inference(model, rules)"
        )
