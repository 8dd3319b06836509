"""Attention kernels for Hopper GPUs (`mosaic_gpu`), and the pieces that all kernels share."""
