"""Network parts of both sides: authenticated listeners, interfaces, rendezvous, library versions.

Knows no version and no engine.
"""
