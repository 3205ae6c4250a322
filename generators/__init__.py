"""Rollouts: an agent beside an inference engine. No loss, no Megatron.

Imported by deploy.
"""
