"""Conventions of our processes: command line, logs, signals, children, waits.

For code that every role's entry point needs; nothing here knows a message or a setting's meaning.
"""
