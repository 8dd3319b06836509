"""What a family that sees images has beside its text: the sizes of its tower, their reader, and names of its weights.

One file per tower, as in `maxlib.models`; a family keeps one in its `Config.vision`. The layers are in `maxlib.nn`.
"""
