"""Preflight of a run: what each of its hosts finds, judged by pure functions.

`facts.py` says what a fact is. Each other module observes one kind of thing and judges it in a
`judge_` function, which sees values alone. `node.py` is the program that looks at one host.
Imported by deploy.commands.
"""
