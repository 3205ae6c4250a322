"""Preflight of a run: findings on each host, judged by pure functions.

`facts.py` defines a fact. Each other module observes one kind of thing and judges it in a
`judge_` function, which only sees values. `node.py` is the program that looks at one host.
Imported by deploy.commands.
"""
