"""Cross-entropy from hidden states and the unembedding, without storing all logits."""
