"""Reports of a run: status, files in the run folder, experiment trackers.

Reads the ledger and the roles' reports; nothing here changes what is trained.
Imported by broker.dashboard, broker.history, broker.run_ledger, broker.server, broker.service,
broker.startup and deploy.
"""
