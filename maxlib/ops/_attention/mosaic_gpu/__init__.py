"""Attention for Hopper GPUs in Pallas Mosaic GPU, forward and backward; docs/kernels.md explains the kernels."""

from maxlib.ops._attention.mosaic_gpu.api import mosaic_gpu as mosaic_gpu
from maxlib.ops._attention.mosaic_gpu.api import unsupported_reason as unsupported_reason
