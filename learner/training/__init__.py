"""One learner step: policies, advantages, losses, optimizer.

Takes packed batches, returns figures; where batches come from is batches' part.
Imported by deploy.check, deploy.launch, learner.checkpoints, learner.launch, learner.loop,
learner.main and learner.starting_policy.
"""
