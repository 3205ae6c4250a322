"""Loads a TOML file into typed settings, and defines the sections read by several roles.

A section that a single role reads belongs to that role's config.py.
"""
