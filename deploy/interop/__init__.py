"""Other systems' formats: settings of verl, job files of cluster managers.

Imported by deploy.commands.
"""
