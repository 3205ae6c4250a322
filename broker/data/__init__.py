"""Sources of prompts (files, generated data sets), and their mixing.

Knows no lease and no store.
Imported by broker.main, broker.rewards, broker.run_ledger, broker.service, broker.startup, deploy,
generators.environments.adapters and generators.tools.offline.
"""
