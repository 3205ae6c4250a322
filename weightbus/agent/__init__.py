"""The generator's side of the weight bus: joins, receives, checks, loads, reports.

Imported by generators; what it needs from an engine is in engine.
"""
