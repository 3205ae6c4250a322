"""An endpoint of OpenAI's API for one trajectory, which records the tokens of every call.

Imported by generators.
"""
