"""Grouped matmul for Hopper GPUs in Pallas Mosaic GPU; docs/kernels.md explains the kernels."""

from maxlib.ops.grouped_matmul.mosaic_gpu.api import glu as glu
from maxlib.ops.grouped_matmul.mosaic_gpu.api import mosaic_gpu as mosaic_gpu
from maxlib.ops.grouped_matmul.mosaic_gpu.api import refuses as refuses
