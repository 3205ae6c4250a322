"""Errors of bytes that are not what they should be."""

import msgspec

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError)
"""What msgspec raises for them."""
