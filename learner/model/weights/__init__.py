"""Weights of the model under Hugging Face names: divided, gathered, read and dequantized.

Imported by deploy.preflight.check.model and learner.
"""
