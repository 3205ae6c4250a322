"""The generator's side of the weight bus: joins, receives, checks, loads, reports.

Imported by generators; engine.py is its interface to an engine.
"""
