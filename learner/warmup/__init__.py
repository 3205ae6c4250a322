"""Supervised warm-up: a policy imitates demonstrations until enough of its answers are right.

A program of its own: python -m slipstream.learner.warmup.main.
"""
