"""Attention: one public function, mask specs, and one file per implementation."""

from maxlib.ops.attention.api import attention as attention
from maxlib.ops.attention.api import explain_attention as explain_attention
from maxlib.ops.attention.dispatch import capabilities as capabilities
from maxlib.ops.attention.masks import Causal as Causal
from maxlib.ops.attention.masks import Chunked as Chunked
from maxlib.ops.attention.masks import Full as Full
from maxlib.ops.attention.masks import Mask as Mask
from maxlib.ops.attention.masks import Prefix as Prefix
from maxlib.ops.attention.masks import SlidingWindow as SlidingWindow
from maxlib.ops.attention.masks import Spans as Spans
from maxlib.ops.attention.masks import Tokens as Tokens
from maxlib.ops.attention.masks import key_intervals as key_intervals
from maxlib.ops.attention.masks import query_intervals as query_intervals
from maxlib.ops.attention.ring import ring_attention as ring_attention
