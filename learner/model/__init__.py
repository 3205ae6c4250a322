"""The Megatron-Core model: device, ranks, architecture, and the names of its weights elsewhere.

Knows no batch, no loss and no broker.
Imported by deploy.commands, deploy.predict, deploy.preflight and learner.
"""
