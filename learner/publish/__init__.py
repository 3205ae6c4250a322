"""The learner's side of a publish: its parameters written in place, and the relay it keeps running.

Imports weightbus.version; the relay itself is weightbus.relay.
"""
