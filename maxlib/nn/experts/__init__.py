"""Mixtures of experts: the layer, its matmuls, the dispatch of tokens and their exchange between devices."""
