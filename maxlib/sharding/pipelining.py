"""Functions that run layers in stages, for models and training steps. To configure a pipeline, use `Pipeline`."""

from maxlib.sharding._gpipe import LAYER_INPUT as LAYER_INPUT
from maxlib.sharding._gpipe import pipelined as pipelined
from maxlib.sharding._gpipe import stages as stages
from maxlib.sharding._layout import inside_stage as inside_stage
from maxlib.sharding._layout import is_inside_stage as is_inside_stage
from maxlib.sharding._pipeline_1f1b import one_f_one_b as one_f_one_b
from maxlib.sharding._pipeline_chunks import Schedule as Schedule
from maxlib.sharding._pipeline_chunks import chunks as chunks
