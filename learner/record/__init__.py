"""Records of a learner besides weights: trained trajectories, profiles, throughput.

Imported by learner.loop and learner.training.
"""
