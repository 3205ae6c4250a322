"""One learner step: policies, advantages, losses, optimizer.

Takes packed batches, returns figures; where batches come from is batches' part.
Imported by deploy.predict.size, deploy.preflight, learner.checkpoints, learner.launch,
learner.loop, learner.main, learner.starting_policy, learner.tools.align and learner.tools.measure.
"""
