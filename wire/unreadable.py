"""Errors of bytes that are not what they should be."""

import msgspec

UNREADABLE = (msgspec.DecodeError, UnicodeError, RecursionError, OverflowError)
"""What msgspec raises for them."""
