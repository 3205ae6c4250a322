"""Batches from the broker or a file, planned by rank 0, packed into microbatches.

Knows ranks and devices, but no model's weights and no loss.
Imported by learner.commands, learner.coordinator, learner.launch, learner.loop, learner.pool,
learner.record, learner.tools.align, learner.tools.measure and learner.training.
"""
