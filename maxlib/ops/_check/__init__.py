"""Implementation of `python -m maxlib.ops check`: compares the kernels with float32 on this machine."""
