"""The bytes of one version: layout, memory, manifest, checksums, disk; what a publish costs.

No sockets. Imported by deploy.check, deploy.commands, deploy.simulate, deploy.sizing,
generators.sglang, learner.checkpoints, learner.model, learner.publish, weightbus.agent and
weightbus.relay.
"""
