"""Implementation of `python -m maxlib.ops`: tests and times the kernels on this machine, and tunes their tiles."""
