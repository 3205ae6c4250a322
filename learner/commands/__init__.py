"""Commands of tenants, carried out on a learner's ranks in place of the training of a run.

Every rank carries out the same commands: rank 0 asks the command server and reports.
Imported by learner.launch.
"""
