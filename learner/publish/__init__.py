"""The learner's side of a publish: its parameters written in place, and the relay it keeps running.

The relay itself is weightbus.relay.
Imported by learner.batches, learner.launch, learner.loop, learner.main and learner.publishing.
"""
