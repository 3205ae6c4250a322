"""Terminal views of a run, and the readers of its state.

Imported by deploy.commands and deploy.preflight.
"""
