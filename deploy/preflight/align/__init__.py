"""Compares the outputs of learner, SGLang and transformers for the same tokens.

Used only by `slipstream align`.
"""
