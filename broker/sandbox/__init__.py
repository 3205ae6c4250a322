"""Untrusted Python under bubblewrap: limits, verdicts.

Imported by rewards that run programs and by the reward worker for its children.
"""
