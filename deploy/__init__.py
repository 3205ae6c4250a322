"""Runs of all roles: settings as a whole, supervision, the command `slipstream`."""
