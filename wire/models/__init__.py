"""Facts of a published model folder: sizes, families, FLOPs, files and digests. No torch.

A module of families describes one model family as tables.
"""
