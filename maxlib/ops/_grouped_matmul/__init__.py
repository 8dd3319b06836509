"""Grouped matmul: the public function, its transpose, gated linear units, and one file per implementation."""
