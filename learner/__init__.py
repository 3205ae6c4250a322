"""The training role: Megatron-Core model, packed batches, optimizer, checkpoints.

loop calls batches, training, checkpoints and publish; model is below all of them.
tools are programs that commands start.
"""
