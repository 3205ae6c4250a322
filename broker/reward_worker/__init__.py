"""The reward worker's process: leases trajectories, scores them in child processes, answers.

A child's functions are found by rewards.loading and confined by sandbox.
"""
