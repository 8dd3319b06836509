"""Recurrences with a matrix as state: the gated delta rule, Kimi delta attention, and Mamba-2's state-space duality."""

from maxlib.ops._recurrent.gated_delta import explain_gated_delta_rule as explain_gated_delta_rule
from maxlib.ops._recurrent.gated_delta import gated_delta_rule as gated_delta_rule
from maxlib.ops._recurrent.kimi_delta import explain_kimi_delta_attention as explain_kimi_delta_attention
from maxlib.ops._recurrent.kimi_delta import kimi_delta_attention as kimi_delta_attention
from maxlib.ops._recurrent.ssd import explain_ssd as explain_ssd
from maxlib.ops._recurrent.ssd import ssd as ssd
