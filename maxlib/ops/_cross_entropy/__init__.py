"""Cross-entropy from hidden states and the unembedding, without storing all logits."""

from maxlib.ops._cross_entropy.api import CrossEntropy as CrossEntropy
from maxlib.ops._cross_entropy.api import is_learned as is_learned
from maxlib.ops._cross_entropy.api import linear_cross_entropy as linear_cross_entropy
from maxlib.ops._cross_entropy.distillation import divergence as divergence
from maxlib.ops._cross_entropy.distillation import linear_divergence as linear_divergence
from maxlib.ops._cross_entropy.distillation import linear_gather_log_probs as linear_gather_log_probs
from maxlib.ops._cross_entropy.distillation import linear_top_k as linear_top_k
from maxlib.ops._cross_entropy.distillation import top_k_divergence as top_k_divergence
from maxlib.ops._cross_entropy.log_probs import LogProbs as LogProbs
from maxlib.ops._cross_entropy.log_probs import linear_log_probs as linear_log_probs
