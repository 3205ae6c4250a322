"""Environments on another host: a server that runs them, and a generator's link to servers.

Imported by generators.environments.
"""
