"""Sharding from outside: meshes, rules, and parameters born in their place. Everything works without a mesh too."""

from maxlib.sharding.create import create as create
from maxlib.sharding.create import sharding_of as sharding_of
from maxlib.sharding.create import shardings as shardings
from maxlib.sharding.map_op import map_op as map_op
from maxlib.sharding.mesh import make_mesh as make_mesh
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
