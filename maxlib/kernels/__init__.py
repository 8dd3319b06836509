"""The library's own Pallas kernels and their shared code, as functions of arrays.

`maxlib.ops` chooses between them. Modules here handle shapes, tiles and one kind of hardware, but no masks, models or
tables of implementations.
"""
