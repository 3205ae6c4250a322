"""Rollouts: an agent with an inference engine. No loss, no Megatron.

Imported by deploy.
"""
