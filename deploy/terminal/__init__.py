"""What a person is shown of a run, and how its state is read for it.

Imported by commands and launch.
"""
