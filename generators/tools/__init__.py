"""Programs around an engine without a run: offline generation, trials, alignment.

Imported by deploy and generators.main.
"""
