"""One engine whose ranks are on several hosts: node 0 leads, the others follow (docs/adr/0052).

book, card and verdict decide; leader and follower have the link, service runs a follower
and host_fetcher its half of a publish.
Imported by generators.main and generators.service.
"""
