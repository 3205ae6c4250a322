"""Checks before a run: machines, networks, stores and models, and equal log probabilities.

Imported by deploy.commands.
"""
