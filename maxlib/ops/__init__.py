"""Pure functions on arrays: no modules, no configuration."""

from maxlib.ops._attention import BidirectionalBlocks as BidirectionalBlocks
from maxlib.ops._attention import Causal as Causal
from maxlib.ops._attention import Chunked as Chunked
from maxlib.ops._attention import Full as Full
from maxlib.ops._attention import Mask as Mask
from maxlib.ops._attention import Prefix as Prefix
from maxlib.ops._attention import SlidingWindow as SlidingWindow
from maxlib.ops._attention import attention as attention
from maxlib.ops._attention import explain_attention as explain_attention
from maxlib.ops._attention import ring_attention as ring_attention
from maxlib.ops._cross_entropy import CrossEntropy as CrossEntropy
from maxlib.ops._cross_entropy import linear_cross_entropy as linear_cross_entropy
from maxlib.ops._grid_rope import GridRope as GridRope
from maxlib.ops._grouped_matmul import Layout as Layout
from maxlib.ops._grouped_matmul import grouped_glu as grouped_glu
from maxlib.ops._grouped_matmul import grouped_matmul as grouped_matmul
from maxlib.ops._grouped_matmul import grouped_outer as grouped_outer
from maxlib.ops._rope import DynamicNTK as DynamicNTK
from maxlib.ops._rope import LinearScaling as LinearScaling
from maxlib.ops._rope import Llama3Scaling as Llama3Scaling
from maxlib.ops._rope import LongRope as LongRope
from maxlib.ops._rope import Proportional as Proportional
from maxlib.ops._rope import Rope as Rope
from maxlib.ops._rope import Yarn as Yarn
from maxlib.ops._rope import apply_rope as apply_rope
from maxlib.ops._rope import yarn_mscale as yarn_mscale
