"""Pure: the state of every prompt group, who may start one, and which ones a step may train.

No sockets, files, clocks or Redis; time is an argument.
Imported by broker.identity, broker.report, broker.run_ledger, broker.server, broker.service,
broker.startup, broker.store and deploy.
"""
