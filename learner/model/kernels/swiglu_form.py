"""Forms of SwiGLU that families have."""

from typing import NamedTuple


class Form(NamedTuple):
    """gate * sigmoid(slope * gate) * (up + offset); plain SwiGLU where nothing is set."""

    slope: float = 1.0
    offset: float = 0.0
    limit: float | None = None  # gates are at most it, ups between it and its negative


PLAIN = Form()
