"""Where prompts come from: files, generated data sets, and how they are mixed.

Knows no lease and no store.
Imported by broker.main, broker.rewards, broker.run_ledger, broker.service, broker.startup, deploy
and generators.offline.
"""
