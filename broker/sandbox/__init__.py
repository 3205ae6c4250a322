"""Untrusted Python under bubblewrap: limits, verdicts.

Imported by broker.reward_worker, broker.rewards, deploy.interop.verl and generators.environments.
"""
