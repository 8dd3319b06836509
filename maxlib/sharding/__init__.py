"""Layouts of a program over devices: meshes, strategies that combine, and parameters created already sharded.

Everything also works without a layout, on one device. Submodules have more: `strategies` (the classes behind the
presets), `layers` (queries for layers with kernels), `pipelining` (running layers in stages), `memory` (arrays on the
host).
"""

from maxlib.sharding import layers as layers
from maxlib.sharding import memory as memory
from maxlib.sharding import pipelining as pipelining
from maxlib.sharding import strategies as strategies
from maxlib.sharding._axes import ARRAY_AXES as ARRAY_AXES
from maxlib.sharding._axes import IfFree as IfFree
from maxlib.sharding._axes import declare_axes as declare_axes
from maxlib.sharding._constrain import constrain as constrain
from maxlib.sharding._create import check_no_aliases as check_no_aliases
from maxlib.sharding._create import eval_shape as eval_shape
from maxlib.sharding._create import init_sharded as init_sharded
from maxlib.sharding._create import shardings as shardings
from maxlib.sharding._describe import describe as describe
from maxlib.sharding._layout import Layout as Layout
from maxlib.sharding._layout import check_layout as check_layout
from maxlib.sharding._layout import current as current
from maxlib.sharding._layout import use as use
from maxlib.sharding._mesh import MESH_AXES as MESH_AXES
from maxlib.sharding._mesh import MeshShape as MeshShape
from maxlib.sharding._mesh import make_mesh as make_mesh
from maxlib.sharding._mesh import parse_degrees as parse_degrees
from maxlib.sharding._parallelism import ExpertParallel as ExpertParallel
from maxlib.sharding._pipeline import Pipeline as Pipeline
from maxlib.sharding._presets import CP_GATHER as CP_GATHER
from maxlib.sharding._presets import CP_RING as CP_RING
from maxlib.sharding._presets import CP_ULYSSES as CP_ULYSSES
from maxlib.sharding._presets import DP as DP
from maxlib.sharding._presets import EP as EP
from maxlib.sharding._presets import FSDP as FSDP
from maxlib.sharding._presets import FSDP_BY_EXPERT as FSDP_BY_EXPERT
from maxlib.sharding._presets import FSDP_TP as FSDP_TP
from maxlib.sharding._presets import OFFLOAD_LAYERS as OFFLOAD_LAYERS
from maxlib.sharding._presets import OFFLOAD_OPTIMIZER as OFFLOAD_OPTIMIZER
from maxlib.sharding._presets import PP as PP
from maxlib.sharding._presets import PP_1F1B as PP_1F1B
from maxlib.sharding._presets import PRESETS as PRESETS
from maxlib.sharding._presets import SP as SP
from maxlib.sharding._presets import TP as TP
from maxlib.sharding._presets import ZERO1 as ZERO1
from maxlib.sharding._presets import preset as preset
from maxlib.sharding._presets import preset_name as preset_name
from maxlib.sharding._shard_map import shard_map_by_name as shard_map_by_name
from maxlib.sharding._strategy import Strategy as Strategy
