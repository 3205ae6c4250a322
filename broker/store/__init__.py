"""Durability: events, snapshots and payloads in Redis, and the event log in the run folder.

Knows the ledger's types, decides nothing.
Imported by broker.dashboard, broker.history, broker.report, broker.run_ledger, broker.server,
broker.service, broker.startup, deploy.preflight.check and deploy.commands.
"""
