"""Trajectories of several turns: which tokens a policy was given, and which it chose.

Imported by deploy and generators. Without HTTP and without SGLang.
"""
