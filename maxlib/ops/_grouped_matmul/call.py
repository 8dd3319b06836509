"""The properties of a grouped matmul that decide its kernel."""

import dataclasses

from maxlib.ops._dispatch import Call


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedCall(Call):
    """The properties of a call that decide its kernel; `dtype` is that of the rows.

    Args:
        rows: Number M of rows.
        experts: Number E of experts.
        inputs: Width I of the rows.
        outputs: Width O of the results.
        weight_order: Order of the dimensions of the weights.
        weight_dtype: Dtype of the weights.
        out_dtype: Dtype of the result of narrow operands, or None.
        is_array: False for a quantized weight.
    """

    rows: int
    experts: int
    inputs: int
    outputs: int
    weight_order: str
    weight_dtype: str
    out_dtype: str | None = None
    is_array: bool = True

    @property
    def weight_shape(self) -> tuple[int, int, int]:
        """Returns the shape of the weights."""
        sizes = {"E": self.experts, "O": self.outputs, "I": self.inputs}
        first, second, third = (sizes[axis] for axis in self.weight_order)
        return first, second, third

    def __str__(self) -> str:
        weights = f"weights {self.weight_shape} {self.weight_order}"
        return f"rows {(self.rows, self.inputs)} {self.dtype}, {weights} on {self.platform} ({self.device_kind})"

    def refuses_operands(self) -> str | None:
        """Returns the reason why kernels for GPUs, which take arrays in half precision, cannot run it, or None."""
        if self.dtype not in ("bfloat16", "float16"):
            return f"takes rows in bfloat16 or float16, not in {self.dtype}"
        if self.out_dtype is not None:
            return "only returns the dtype of its rows"
        return None if self.is_array else "takes arrays; it would restore a quantized weight for all experts at once"
