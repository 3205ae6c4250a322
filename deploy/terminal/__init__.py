"""What a person sees in a terminal, and how the state of a run is read for it.

Imported by commands and launch.
"""
