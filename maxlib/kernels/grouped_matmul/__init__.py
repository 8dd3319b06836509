"""Grouped matmul kernels for Hopper GPUs (`mosaic_gpu`), and the row layout that all grouped matmuls share."""
