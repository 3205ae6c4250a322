"""What a terminal shows of a run, and how its state is read for it.

Imported by deploy.commands and deploy.launch.
"""
