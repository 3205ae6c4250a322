"""Runs of all roles: settings as a whole, supervision, the command `slipstream`.

The only package that imports every other one; none imports it.
"""
