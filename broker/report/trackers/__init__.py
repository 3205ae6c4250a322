"""Experiment trackers for a run's curves: one adapter per tool, chosen by name."""
