"""Training losses: their protocol, and the losses of language models."""
