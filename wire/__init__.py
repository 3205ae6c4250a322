"""What two processes must agree on. msgspec and the standard library only."""
