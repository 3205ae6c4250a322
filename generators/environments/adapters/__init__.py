"""Environments of other libraries, each in a module that is named in ``environment.function``.

A module imports its library when it is imported, and names the extra that installs it.
"""
