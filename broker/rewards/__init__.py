"""Reward functions that come with Slipstream."""
