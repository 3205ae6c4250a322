"""Untrusted Python under bubblewrap: limits, verdicts.

Imported by broker.reward_worker and broker.rewards.
"""
