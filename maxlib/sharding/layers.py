"""What layers ask whose kernels run on parts of arrays: which axes are split, and how parts come together."""

from maxlib.sharding._constrain import axis_of as axis_of
from maxlib.sharding._constrain import axis_size as axis_size
from maxlib.sharding._constrain import gather_once as gather_once
from maxlib.sharding._constrain import mesh_axes as mesh_axes
from maxlib.sharding._rules import drop_uneven as drop_uneven
from maxlib.sharding._shard_map import AllGatherArg as AllGatherArg
from maxlib.sharding._zigzag import can_zigzag as can_zigzag
from maxlib.sharding._zigzag import natural_order as natural_order
from maxlib.sharding._zigzag import unzigzag as unzigzag
from maxlib.sharding._zigzag import zigzag as zigzag
