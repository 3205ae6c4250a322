"""What a learner leaves behind besides weights: trained trajectories and profiles.

Imported by learner.loop and learner.training.
"""
