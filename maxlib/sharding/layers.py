"""Helpers for layers: how axes are split, how parts are joined, which axes of an array are layer axes."""

from maxlib.sharding._axes import LAYERS as LAYERS
from maxlib.sharding._axes import UNSTAGED_LAYERS as UNSTAGED_LAYERS
from maxlib.sharding._axes import check_axes as check_axes
from maxlib.sharding._axes import is_stacked as is_stacked
from maxlib.sharding._axes import mesh_axes_of as mesh_axes_of
from maxlib.sharding._axes import num_layer_axes as num_layer_axes
from maxlib.sharding._axes import own_axes as own_axes
from maxlib.sharding._constrain import axis_of as axis_of
from maxlib.sharding._constrain import axis_size as axis_size
from maxlib.sharding._constrain import gather_once as gather_once
from maxlib.sharding._constrain import gather_rounded as gather_rounded
from maxlib.sharding._constrain import mesh_axes as mesh_axes
from maxlib.sharding._rules import drop_uneven as drop_uneven
from maxlib.sharding._shard_map import AllGatherArg as AllGatherArg
from maxlib.sharding._shard_map import gathers_odd_parts as gathers_odd_parts
from maxlib.sharding._zigzag import can_zigzag as can_zigzag
from maxlib.sharding._zigzag import natural_order as natural_order
from maxlib.sharding._zigzag import unzigzag as unzigzag
from maxlib.sharding._zigzag import zigzag as zigzag
