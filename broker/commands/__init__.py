"""The command server: what tenants ask over HTTP is on disk before it is acknowledged.

``log`` decides and remembers, in one SQLite file; ``site`` is HTTP, ``workers`` answers the learner
and the engines, which ask by ``link``; ``keys`` are those of tenants.
Imported by broker.main, deploy.commands, deploy.launch, generators.serving and learner.commands.
"""
