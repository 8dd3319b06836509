"""State-space duality (Mamba-2): one public function, its definition, and its form in matmuls."""

from maxlib.ops._ssd.api import ssd as ssd
