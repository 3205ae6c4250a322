"""Starting a run: which processes where, with how much memory, resumed from which checkpoint.

plan is pure; supervise owns the processes.
Imported by deploy.commands, deploy.preflight and deploy.terminal.
"""
