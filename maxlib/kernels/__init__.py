"""The library's own Pallas programs and what they share: functions of arrays, without a choice among them.

`maxlib.ops` says when each of them runs. A module here knows shapes, tiles and one kind of hardware, never a mask spec,
a table of implementations or a model.
"""
