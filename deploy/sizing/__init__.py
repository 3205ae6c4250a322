"""How large a run's pools must be: layouts that fit, seconds of each, a split of GPUs; with laws.

Pure, but for reading config.json. `answer` calls the rest: `proposals` of the learner's layouts,
`engines`, `pools`, `publishes`. `recipes` predicts published ones; `options` are the commands'.
Imported by deploy.commands and deploy.simulate. Memory is learner/memory.py's.
"""
