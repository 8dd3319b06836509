"""Grouped matmul kernels for Hopper GPUs (`mosaic_gpu`), and what all grouped matmuls know of their rows."""
