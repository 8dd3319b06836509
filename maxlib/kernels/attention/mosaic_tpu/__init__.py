"""Attention for TPUs in Pallas, forward and backward; docs/kernels.md explains the kernels."""

from maxlib.kernels.attention.mosaic_tpu.api import count_tiles as count_tiles
from maxlib.kernels.attention.mosaic_tpu.api import mosaic_tpu as mosaic_tpu
