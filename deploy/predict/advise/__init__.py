"""What a run's own figures say of the same run with other settings, by the simulator.

`record` reads a run folder, `fit` finds laws and the scenario, `expect` simulates it as it is and
with one change at a time. Imported by deploy.commands.
"""
