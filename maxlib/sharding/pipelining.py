"""Functions that run layers in stages, for models and training steps. To configure a pipeline, `Pipeline` is enough."""

from maxlib.sharding._gpipe import LAYER_INPUT as LAYER_INPUT
from maxlib.sharding._gpipe import pipelined as pipelined
from maxlib.sharding._gpipe import stages as stages
from maxlib.sharding._layout import in_a_stage as in_a_stage
from maxlib.sharding._layout import is_in_a_stage as is_in_a_stage
from maxlib.sharding._pipeline_1f1b import one_f_one_b as one_f_one_b
from maxlib.sharding._pipeline_chunks import Schedule as Schedule
from maxlib.sharding._pipeline_chunks import chunks as chunks
