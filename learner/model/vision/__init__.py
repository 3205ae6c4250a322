"""Images within a model: the vision tower, its tokens among the others, and their positions.

Imported by learner.
"""
