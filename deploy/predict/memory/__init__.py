"""Pure estimates of memory: a learner's rank, a GPU, a host, part by part with formulas.

Imported by deploy.commands, deploy.predict and deploy.preflight.
"""
