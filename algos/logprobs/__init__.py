"""Log-probabilities of a vocabulary from hidden states, a part of the logits at a time.

Imported by learner.
"""
