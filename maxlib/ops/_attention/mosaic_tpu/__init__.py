"""Attention for TPUs in Pallas, forward and backward; docs/kernels.md explains the kernels."""

from maxlib.ops._attention.mosaic_tpu.api import mosaic_tpu as mosaic_tpu
from maxlib.ops._attention.mosaic_tpu.api import unsupported_reason as unsupported_reason
