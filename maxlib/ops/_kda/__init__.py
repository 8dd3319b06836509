"""Kimi delta attention (KDA): one public function, its definition, and its form in matmuls."""

from maxlib.ops._kda.api import explain_kimi_delta_attention as explain_kimi_delta_attention
from maxlib.ops._kda.api import kimi_delta_attention as kimi_delta_attention
