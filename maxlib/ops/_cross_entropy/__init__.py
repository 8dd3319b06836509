"""Cross-entropy from hidden states and the unembedding, without storing all logits."""

from maxlib.ops._cross_entropy.api import CrossEntropy as CrossEntropy
from maxlib.ops._cross_entropy.api import LogProbs as LogProbs
from maxlib.ops._cross_entropy.api import fused_linear_cross_entropy as fused_linear_cross_entropy
from maxlib.ops._cross_entropy.api import fused_linear_log_probs as fused_linear_log_probs
from maxlib.ops._cross_entropy.api import is_learned as is_learned
from maxlib.ops._cross_entropy.distillation import check_vocabulary as check_vocabulary
from maxlib.ops._cross_entropy.distillation import divergence as divergence
from maxlib.ops._cross_entropy.distillation import fused_linear_divergence as fused_linear_divergence
from maxlib.ops._cross_entropy.distillation import fused_linear_gather_log_probs as fused_linear_gather_log_probs
from maxlib.ops._cross_entropy.distillation import fused_linear_top_k as fused_linear_top_k
from maxlib.ops._cross_entropy.distillation import top_k_divergence as top_k_divergence
