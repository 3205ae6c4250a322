"""Listening sockets of every process: ROUTERs, pages, endpoints, health ports, and CURVE keys.

Before a key is checked a connection can have 64 KiB kept, for seconds; limits leave descriptors.
Imported by broker.client, broker.commands, broker.dashboard, broker.main, broker.reward_worker,
broker.server, generators, learner and weightbus.
"""
