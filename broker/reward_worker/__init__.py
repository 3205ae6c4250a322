"""The reward worker's process: leases trajectories, scores them in child processes, answers.

rewards.loading finds what a child runs; sandbox contains it.
Imported by deploy and generators.
"""
