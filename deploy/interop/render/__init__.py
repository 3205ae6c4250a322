"""Files for other programs that start a run's roles: Slurm, Kubernetes, compose, SkyPilot.

All of it is pure: from the run's settings to texts by file name.
Imported by deploy.commands.
"""
