"""The learner's side of a publish: parameters written in place, and a relay kept running.

The relay itself is weightbus.relay.
Imported by learner.batches, learner.launch, learner.loop, learner.main and learner.publishing.
"""
