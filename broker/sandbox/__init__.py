"""Untrusted Python under bubblewrap: limits, verdicts.

Imported by broker.reward_worker, broker.rewards and generators.environments.
"""
