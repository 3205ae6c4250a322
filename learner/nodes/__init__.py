"""A learner on several hosts: what its hosts compare, and what ends when another host has ended.

weightbus.hosts has their meeting. Imported by learner.launch, before any collective.
"""
