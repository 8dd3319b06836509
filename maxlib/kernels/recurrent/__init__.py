"""Recurrences with a matrix as state, chunk by chunk: the mathematics of a chunk, and the kernels for TPUs."""
