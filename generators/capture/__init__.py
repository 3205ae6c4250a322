"""An endpoint of OpenAI's and Anthropic's wires over HTTP, which records the tokens of every call.

Imported by generators.
"""
