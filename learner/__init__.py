"""The training role: Megatron-Core model, packed batches, optimizer, checkpoints."""
