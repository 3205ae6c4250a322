"""Several runs of one learner: tenants, whose policies are adapters of one model, take turns.

Imported by learner.
"""
