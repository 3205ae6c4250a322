"""Transports of buckets from the relay to engines. weightbus/transports.py lists them.

A transport sees a publication and members; it knows nothing of the publisher.
Imported by weightbus.relay.
"""
