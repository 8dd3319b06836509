"""The decoder: its context, inputs, output head and multi-token prediction."""
