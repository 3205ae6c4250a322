"""A run's history as data: columns and rows per step, rates, trajectories, and comparisons.

Imported by broker.dashboard and deploy.
"""
