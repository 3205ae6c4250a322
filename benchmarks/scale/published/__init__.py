"""What others have published of their runs, as data: one file per system, with sources.

Read by benchmarks.scale.calibration.
"""
