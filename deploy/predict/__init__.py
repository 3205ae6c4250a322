"""Predictions of a run before it starts: laws, memory, pool sizes, simulation, advice.

Imported by deploy.commands and deploy.preflight.
"""
