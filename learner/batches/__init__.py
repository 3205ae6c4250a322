"""Batches from the broker or a file, planned by rank 0, packed into microbatches.

No model is known here.
"""
