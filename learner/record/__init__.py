"""A learner's records besides weights: trained trajectories and profiles.

Imported by the loop.
"""
