"""Programs that use the learner's model without a run: measured memory, alignment.

Commands start them as processes.
"""
