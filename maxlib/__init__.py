"""Composable LLM building blocks on JAX and Flax NNX."""
