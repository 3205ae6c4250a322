"""The generator's side of the weight bus: joins, receives, checks, loads, reports.

engine.py states what it needs from an engine.
Imported by deploy.preflight.check and generators.
"""
