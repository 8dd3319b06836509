"""Grouped matmul for Hopper GPUs in Pallas Mosaic GPU; docs/kernels.md explains the kernels."""

from maxlib.kernels.grouped_matmul.mosaic_gpu.api import glu as glu
from maxlib.kernels.grouped_matmul.mosaic_gpu.api import mosaic_gpu as mosaic_gpu
