"""Stacks of layers; layers of equal kind are scanned."""

from maxlib.nn.stack._run import Carry as Carry
from maxlib.nn.stack._run import scan_group as scan_group
from maxlib.nn.stack._stack import Stack as Stack
from maxlib.nn.stack._stack import SupportsPipelining as SupportsPipelining
from maxlib.nn.stack._stack import check_no_inputs as check_no_inputs
from maxlib.nn.stack._stack import unstack as unstack
from maxlib.nn.stack._storage import Grouping as Grouping
from maxlib.nn.stack._storage import group_at as group_at
from maxlib.nn.stack._storage import layer_axis as layer_axis
from maxlib.nn.stack._storage import layers_by_slot as layers_by_slot
from maxlib.nn.stack._storage import map_layers as map_layers
