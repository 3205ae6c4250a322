"""What a learner leaves behind besides weights: trained trajectories and profiles.

Imported by the loop.
"""
