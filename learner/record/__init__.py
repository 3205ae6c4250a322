"""A learner's records besides weights: trained trajectories, profiles, throughput.

Imported by learner.loop and learner.training.
"""
