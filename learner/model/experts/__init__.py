"""Experts: choices, their record and replay, the way of tokens to experts, and their products.

Imported by learner.
"""
