"""Grouped matmul: the public function, its transpose, the fused gate and up, and one file per implementation."""

from maxlib.ops._grouped_matmul.api import ExpertWeightOrder as ExpertWeightOrder
from maxlib.ops._grouped_matmul.api import explain_grouped_matmul as explain_grouped_matmul
from maxlib.ops._grouped_matmul.api import grouped_matmul as grouped_matmul
from maxlib.ops._grouped_matmul.api import grouped_outer as grouped_outer
from maxlib.ops._grouped_matmul.glu import grouped_glu as grouped_glu
