"""The command server: what tenants ask over HTTP is on disk before it is acknowledged.

``log`` decides and remembers, in one SQLite file; ``site`` is HTTP, ``workers`` answers the learner
and the engines, which ask by ``link``. Imported by broker.main; ``keys`` by deploy.commands, and
``link`` by learner and generators.
"""
