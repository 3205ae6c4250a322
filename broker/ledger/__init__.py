"""Pure: the state of every prompt group, permits to start one, and the choice of a step's batch.

No sockets, files, clocks or Redis; time is an argument. Imported by the broker's other rooms.
"""
