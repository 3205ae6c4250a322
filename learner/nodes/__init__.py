"""A learner on several hosts: what its hosts compare, and what ends when another host has ended.

weightbus.hosts has their meeting, which comes before any collective.
Imported by learner.launch.
"""
