"""The mathematics of the learner: pure tensor functions. torch only, no messages, no I/O.

Imported by deploy.commands and learner.
"""
