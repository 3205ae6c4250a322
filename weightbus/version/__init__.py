"""The bytes of one version: layout, shared memory, manifest, and its copy on disk. No sockets.

Imported by deploy.check, learner.checkpoints, learner.model, learner.publish, weightbus.agent and
weightbus.relay.
"""
