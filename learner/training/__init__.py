"""One learner step: policies, advantages, losses, optimizer. Takes packed batches, returns figures.

Imported by deploy.config, deploy.predict.size, deploy.preflight, learner.checkpoints,
learner.commands, learner.launch, learner.loop, learner.main, learner.pool,
learner.starting_policy and learner.tools.
"""
