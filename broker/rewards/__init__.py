"""Reward functions that come with Slipstream, and `sdk` to write one's own.

Module paths are public: settings name them. They run in the reward worker's child processes.
Imported by broker.reward_worker and generators.environments.adapters.
"""
