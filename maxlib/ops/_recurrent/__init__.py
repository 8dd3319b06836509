"""Recurrences with a matrix as state: the gated delta rule, Kimi delta attention, and Mamba-2's state-space duality."""
