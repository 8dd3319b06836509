"""Gated delta rule: one public function, its definition, and its form in matmuls."""

from maxlib.ops._gated_delta.api import gated_delta_rule as gated_delta_rule
