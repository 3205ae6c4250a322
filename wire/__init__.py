"""What two processes agree on: messages, settings, files in a run folder, process conventions.

Needs msgspec and the standard library only. Every package may import it; it imports none.
"""
