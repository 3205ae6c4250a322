"""The reward worker's process: leases trajectories, scores them in child processes, answers.

What a child runs is found by rewards.loading and held by sandbox.
"""
