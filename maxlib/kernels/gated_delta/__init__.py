"""Kernels of the gated delta rule for TPUs (`mosaic_tpu`)."""

from maxlib.kernels.gated_delta.mosaic_tpu import mosaic_tpu as mosaic_tpu
from maxlib.kernels.gated_delta.mosaic_tpu import refuses as refuses
