"""Elementwise parts of a layer in one pass each: Triton kernels, and torch's operators on a CPU.

Know tensors alone.
Imported by learner.
"""
