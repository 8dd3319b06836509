"""Kernels of the gated delta rule for TPUs (`mosaic_tpu`)."""

from maxlib.kernels.gated_delta.api import DeltaTPUTiles as DeltaTPUTiles
from maxlib.kernels.gated_delta.api import mosaic_tpu as mosaic_tpu
from maxlib.kernels.gated_delta.api import refuses as refuses
