"""Tools for environments: functions that a policy may call."""
