"""Attention layers: grouped-query, latent (MLA), sparse with its lightning indexer, and over shared keys and values."""
