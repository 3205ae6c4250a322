"""Where every process of the product listens: ROUTER sockets, pages, endpoints, ports for health.

Before a key is checked a connection can have 64 KiB kept, for seconds; limits leave descriptors.
Imported by broker.dashboard, broker.main, broker.reward_worker, broker.server, generators, learner
and weightbus.
"""
