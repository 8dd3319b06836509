"""Pure functions on arrays: no modules, no configuration."""

from maxlib.ops.attention import Causal as Causal
from maxlib.ops.attention import Chunked as Chunked
from maxlib.ops.attention import Full as Full
from maxlib.ops.attention import Mask as Mask
from maxlib.ops.attention import Prefix as Prefix
from maxlib.ops.attention import SlidingWindow as SlidingWindow
from maxlib.ops.attention import Spans as Spans
from maxlib.ops.attention import attention as attention
from maxlib.ops.attention import explain_attention as explain_attention
from maxlib.ops.attention import ring_attention as ring_attention
from maxlib.ops.cross_entropy import CrossEntropy as CrossEntropy
from maxlib.ops.cross_entropy import linear_cross_entropy as linear_cross_entropy
from maxlib.ops.grid_rope import GridRope as GridRope
from maxlib.ops.grouped_matmul import Layout as Layout
from maxlib.ops.grouped_matmul import grouped_glu as grouped_glu
from maxlib.ops.grouped_matmul import grouped_matmul as grouped_matmul
from maxlib.ops.grouped_matmul import grouped_outer as grouped_outer
from maxlib.ops.rope import DynamicNTK as DynamicNTK
from maxlib.ops.rope import LinearScaling as LinearScaling
from maxlib.ops.rope import Llama3Scaling as Llama3Scaling
from maxlib.ops.rope import LongRope as LongRope
from maxlib.ops.rope import Proportional as Proportional
from maxlib.ops.rope import Rope as Rope
from maxlib.ops.rope import Yarn as Yarn
from maxlib.ops.rope import apply_rope as apply_rope
from maxlib.ops.rope import yarn_mscale as yarn_mscale
