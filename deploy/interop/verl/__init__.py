"""Settings of verl read as settings of Slipstream; `slipstream import-verl` alone comes in here.

`hydra` reads commands and files, `script_run` what a script starts; `topics` have a row for every
key of verl, `table` all of them; `translate` applies rows, `consequences` what they mean together.
All of it is pure but `script_run`.
"""
