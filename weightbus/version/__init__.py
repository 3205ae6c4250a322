"""The bytes of one version: layout, shared memory, manifest, and its copy on disk.

Written by the learner, read by the relay. No sockets.
"""
