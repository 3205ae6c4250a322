"""Families of Hugging Face models, one file each: all that one differs in from another.

The learner, the relay's checks of engines, the memory plan and docs/models.md read them. No torch,
no msgspec, no input or output. ``registry.py`` has them all.
"""
