"""Attention for Hopper GPUs in Pallas Mosaic GPU, forward and backward; docs/kernels.md explains the kernels."""
