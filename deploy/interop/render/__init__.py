"""Files with which other programs start the roles of a run: Slurm, Kubernetes, compose, SkyPilot.

All of it is pure: from the run's settings to texts by file name.
Imported by deploy.commands.
"""
