"""Pure: which errors say that a collective failed, so that the reason is another rank's."""

_COLLECTIVES = ("gloo", "nccl")  # torch raises their failures as RuntimeError, named in the text


def is_of_collective(error: BaseException) -> bool:
    """Return True if an error says that a collective failed here, for a reason elsewhere."""
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(name in text for name in _COLLECTIVES)
