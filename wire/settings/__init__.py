"""How one TOML file becomes typed settings, and the sections that more than one role reads.

A section that a single role reads belongs to that role's config.py.
"""
