"""What is minimized: the protocol of a training loss, and the losses of language models."""
