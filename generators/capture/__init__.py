"""An endpoint of OpenAI's API over HTTP, which records the tokens of every call.

Imported by generators.
"""
