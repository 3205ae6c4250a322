"""The broker's process: sockets, sessions, permissions, and the loop that answers requests.

Decides through ledger, makes durable through store.
Imported by broker.commands, broker.service, deploy.preflight.check, deploy.commands and
deploy.launch.cluster.
"""
