"""Tasks and policies that the examples in configs/ need. Not needed by any other run.

Imported by deploy.commands.
"""
