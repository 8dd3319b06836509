"""Grouped matmul: one public function, and one file per implementation."""

from maxlib.ops.grouped_matmul.api import Layout as Layout
from maxlib.ops.grouped_matmul.api import grouped_matmul as grouped_matmul
