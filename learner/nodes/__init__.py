"""A learner on several hosts: where its ranks are, how they meet, and what ends them together.

launch calls it before any collective; card and verdict decide, meeting and watch act.
"""
