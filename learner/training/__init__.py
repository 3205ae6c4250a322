"""One learner step: policies, advantages, losses, optimizer.

Takes packed batches, returns figures; where batches come from is batches' part.
Imported by deploy.check, deploy.launch, deploy.sizing, learner.align, learner.checkpoints,
learner.launch, learner.loop, learner.main, learner.measure and learner.starting_policy.
"""
