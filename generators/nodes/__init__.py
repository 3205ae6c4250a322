"""One engine whose ranks are on several hosts: node 0 leads, the others follow.

See docs/adr/0052.
"""
