"""Checkpoints: written and read by all ranks, kept or removed, checked, exported.

Their format is documented in docs/checkpoints.md.
Imported by deploy.launch, learner.launch, learner.loop and learner.starting_policy.
"""
