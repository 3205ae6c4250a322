"""Weight versions of an engine: what it received, which tokens it sampled with, and its proof.

Imported by deploy and generators.
"""
