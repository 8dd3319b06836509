"""Kernels of flash-linear-attention for NVIDIA GPUs other than Hopper, in both passes of all three recurrences.

The package (fla-core) has Triton kernels for PyTorch, which transformers runs for Qwen3-Next, Kimi Linear and others.
jax-triton compiles them for JAX. Its public functions take PyTorch's tensors, so the files here launch the kernels
below them in the same order, each with one of the package's own configurations; nothing is measured at run time.

Chunks have 64 tokens. States and sums are float32, operands of matmuls bfloat16 or float16. Every decay is the
exponential of a difference `G[i] - G[j]` for j <= i, or is masked afterwards, so that none overflows: Kimi delta
attention runs the kernels for gates without a bound, which multiply the factors of single tokens within 16 of them.
"""
