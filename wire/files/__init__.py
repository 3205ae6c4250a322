"""Files and folders that one process writes and another one reads.

Formats, paths and checks; anything that needs torch or a socket belongs to a role.
"""
