"""Gated delta rule: its public function, the sequential reference, the chunked form, and the choice between them."""

from maxlib.ops._gated_delta.api import explain_gated_delta_rule as explain_gated_delta_rule
from maxlib.ops._gated_delta.api import gated_delta_rule as gated_delta_rule
