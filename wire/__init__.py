"""Contracts between processes: messages, settings, run-folder files, process conventions.

Needs msgspec and the standard library only, and fsspec where a setting names a URL. Every package
may import it; it imports none.
"""
