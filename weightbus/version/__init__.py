"""The bytes of one version: layout, shared memory, manifest, copy on disk; what a publish costs.

No sockets. Imported by deploy.check, deploy.commands, learner.checkpoints, learner.model,
learner.publish, weightbus.agent and weightbus.relay.
"""
