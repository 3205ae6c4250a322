"""The bytes of one version: layout, memory, manifest, checksums, disk.

No sockets. Imported by deploy.predict, generators.sglang, learner.checkpoints, learner.model,
learner.publish, weightbus.agent and weightbus.relay.
"""
