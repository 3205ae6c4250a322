"""Linear attention: the gated delta rule over packed sequences, and the layer around it.

Imported by learner.
"""
