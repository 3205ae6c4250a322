"""A learner's records besides weights: trained trajectories and profiles.

Imported by learner.loop and learner.training.
"""
