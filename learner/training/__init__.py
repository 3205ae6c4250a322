"""One learner step: policies, advantages, losses, optimizer.

Takes packed batches, returns figures; where batches come from is batches' part.
"""
