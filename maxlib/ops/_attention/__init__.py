"""Attention: one public function, mask specs, and one file per implementation."""

from maxlib.ops._attention.api import attention as attention
from maxlib.ops._attention.api import explain_attention as explain_attention
from maxlib.ops._attention.masks import BidirectionalBlocks as BidirectionalBlocks
from maxlib.ops._attention.masks import BlockCausal as BlockCausal
from maxlib.ops._attention.masks import Causal as Causal
from maxlib.ops._attention.masks import Chunked as Chunked
from maxlib.ops._attention.masks import Full as Full
from maxlib.ops._attention.masks import LocalWindow as LocalWindow
from maxlib.ops._attention.masks import Mask as Mask
from maxlib.ops._attention.masks import MaskHint as MaskHint
from maxlib.ops._attention.masks import Prefix as Prefix
from maxlib.ops._attention.masks import SlidingWindow as SlidingWindow
from maxlib.ops._attention.masks import StaticMask as StaticMask
from maxlib.ops._attention.masks import TokenPositions as TokenPositions
from maxlib.ops._attention.masks import key_intervals as key_intervals
from maxlib.ops._attention.ring import ring_attention as ring_attention
from maxlib.ops._attention.table import attention_implementations as attention_implementations
