"""Slipstream: disaggregated asynchronous reinforcement learning for language models.

The packages lie at the top of the repository; the links here give them one import name.
"""
