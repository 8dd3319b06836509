"""Grouped matmul for Hopper GPUs in Pallas Mosaic GPU; docs/kernels.md explains the kernels."""

from maxlib.ops._grouped_matmul.mosaic_gpu.api import glu as glu
from maxlib.ops._grouped_matmul.mosaic_gpu.api import mosaic_gpu as mosaic_gpu
from maxlib.ops._grouped_matmul.mosaic_gpu.api import unsupported_reason as unsupported_reason
