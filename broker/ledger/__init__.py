"""Pure: the state of every prompt group, permits to start one, and the choice of a step's batch.

No sockets, files, clocks or Redis; time is an argument.
Imported by broker.identity, broker.report, broker.run_ledger, broker.server, broker.service,
broker.startup, broker.store and deploy.
"""
