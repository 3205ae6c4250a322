"""The training role: Megatron-Core model, packed batches, optimizer, checkpoints.

loop calls batches, training, checkpoints and publish; model is below all of them.
memory estimates what a rank holds, measure is the program that looks.
"""
