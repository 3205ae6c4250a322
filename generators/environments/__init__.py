"""Environments: what a policy acts in over several turns, run in processes of their own.

Imported by generators, deploy.preflight.check and deploy.examples.
"""
