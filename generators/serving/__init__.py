"""A generator of a command server: samples under many versions of adapters, in place of a run's.

Imported by generators.main.
"""
