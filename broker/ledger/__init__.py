"""Pure: what is true of every prompt group, who may start one, and which ones a step may train.

No sockets, files, clocks or Redis; time is an argument. Imported by the broker's other rooms.
"""
