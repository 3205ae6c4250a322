"""Choices of experts: rules, the router that applies them, and their record and replay.

Imported by learner.
"""
