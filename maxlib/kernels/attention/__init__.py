"""Attention kernels for Hopper GPUs (`mosaic_gpu`) and TPUs (`mosaic_tpu`), and the pieces that all kernels share."""
