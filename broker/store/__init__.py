"""Durability: events, snapshots and payloads in Redis, and the event log in the run folder.

Knows the ledger's types, decides nothing. Imported by server and startup.
"""
