"""Predicts, from a run's own figures, the same run with other settings; uses the simulator.

`record` reads a run folder, `fit` finds laws and the scenario, `expect` simulates it as it is and
with one change at a time. Imported by deploy.commands.
"""
