"""Lanes of a generator: how many trajectories run at once, and how fast new ones start.

Imported by generators.
"""
