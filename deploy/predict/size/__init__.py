"""Sizes of a run's pools: layouts that fit, seconds of each, a split of GPUs; with laws.

Pure, except for reading config.json. `answer` calls the rest: `proposals` of the learner's layouts,
`engines`, `pools`; `options` are the commands'. Imported by deploy.commands and deploy.preflight.
"""
