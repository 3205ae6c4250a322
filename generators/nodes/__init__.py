"""One engine whose ranks are on several hosts: node 0 leads, the others follow (docs/adr/0052).

weightbus.hosts has their meeting; here is what an engine adds to it: versions, which each host
fetches for itself, and the server with the ranks of a host.
Imported by generators.main and generators.service.
"""
