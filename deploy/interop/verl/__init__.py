"""Settings of verl read as settings of Slipstream; `slipstream import-verl` alone comes in here.

`shell` and `hydra` read command lines, scripts and files; `table` has a row for every key of verl;
`translate` applies the rows and judges what they say together. All of it is pure.
"""
