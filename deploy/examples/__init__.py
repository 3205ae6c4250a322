"""Tasks and policies that the examples in configs/ need.

Each is a program of its own as well.
"""
