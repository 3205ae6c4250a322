"""The Megatron-Core model: device, ranks, architecture, and its weights' names elsewhere.

Knows no batch, no loss and no broker.
Imported by deploy.commands, deploy.predict, deploy.preflight and learner.
"""
