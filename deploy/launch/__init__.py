"""Starting a run: which processes where, with how much memory, resumed from which checkpoint.

plan and memory are pure; supervise owns the processes.
Imported by deploy.check, deploy.commands, deploy.simulate and deploy.sizing.
"""
