"""The command server: what tenants ask over HTTP is on disk before it is acknowledged.

``log`` decides and remembers, in one SQLite file; ``site`` is HTTP, ``workers`` the learner and the
engines, which reach it by ``link``. Imported by broker.main, deploy.commands, learner and generators
(``link`` and ``keys`` alone).
"""
