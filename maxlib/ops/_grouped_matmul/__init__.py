"""Grouped matmul: the public function, its transpose, gated linear units, and one file per implementation."""

from maxlib.ops._grouped_matmul.api import ExpertWeightOrder as ExpertWeightOrder
from maxlib.ops._grouped_matmul.api import explain_grouped_matmul as explain_grouped_matmul
from maxlib.ops._grouped_matmul.api import grouped_matmul as grouped_matmul
from maxlib.ops._grouped_matmul.api import grouped_outer as grouped_outer
from maxlib.ops._grouped_matmul.glu import ClampedSwiGLU as ClampedSwiGLU
from maxlib.ops._grouped_matmul.glu import add_expert_bias as add_expert_bias
from maxlib.ops._grouped_matmul.glu import geglu as geglu
from maxlib.ops._grouped_matmul.glu import grouped_glu as grouped_glu
from maxlib.ops._grouped_matmul.glu import swiglu as swiglu
