"""Conventions of our processes: command line, logs, signals, children, waits.

Code for the entry points of all roles; nothing here knows a message or a setting's meaning.
"""
