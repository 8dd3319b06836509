"""Sharding from outside: meshes, rules, and parameters born in their place. Everything works without a mesh too."""

from maxlib.sharding.create import create as create
from maxlib.sharding.create import sharding_of as sharding_of
from maxlib.sharding.create import shardings as shardings
from maxlib.sharding.map_op import map_op as map_op
from maxlib.sharding.mesh import make_mesh as make_mesh
from maxlib.sharding.rules import CP_GATHER as CP_GATHER
from maxlib.sharding.rules import CP_HEADS as CP_HEADS
from maxlib.sharding.rules import CP_RING as CP_RING
from maxlib.sharding.rules import DP as DP
from maxlib.sharding.rules import FSDP as FSDP
from maxlib.sharding.rules import FSDP_TP as FSDP_TP
from maxlib.sharding.rules import TP as TP
from maxlib.sharding.rules import Rules as Rules
from maxlib.sharding.rules import constrain as constrain
from maxlib.sharding.rules import current as current
from maxlib.sharding.rules import degree as degree
from maxlib.sharding.rules import spec as spec
from maxlib.sharding.rules import use as use
from maxlib.sharding.zigzag import can_zigzag as can_zigzag
from maxlib.sharding.zigzag import context_axis as context_axis
from maxlib.sharding.zigzag import natural_order as natural_order
from maxlib.sharding.zigzag import unzigzag as unzigzag
from maxlib.sharding.zigzag import zigzag as zigzag
