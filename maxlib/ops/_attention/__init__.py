"""Attention: one public function, mask specs, and one file per implementation."""
