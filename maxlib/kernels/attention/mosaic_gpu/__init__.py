"""Attention for Hopper GPUs in Pallas Mosaic GPU, forward and backward; docs/kernels.md explains the kernels."""

from maxlib.kernels.attention.mosaic_gpu.api import mosaic_gpu as mosaic_gpu
