"""Layers with a state of constant size: gated delta net, Kimi delta attention, Mamba-2, short convolutions."""
