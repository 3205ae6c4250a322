"""Pure: an engine's report of weight versions turned into version runs."""

from collections.abc import Sequence
from typing import TypedDict

from slipstream.wire.errors import EngineError, ProtocolError
from slipstream.wire.messages.trajectory import VersionRun
from slipstream.wire.messages.versions import PolicyVersion, parse_label


class VersionSpan(TypedDict):
    """Tokens [start, end) of the output were chosen by the weights called ``version``."""

    version: str
    start: int
    end: int


def version_starts(
    spans: Sequence[VersionSpan], num_tokens: int
) -> list[tuple[int, PolicyVersion]]:
    """Return (first token, version) per run of equal versions.

    Raises:
        EngineError: the spans do not cover [0, num_tokens) without gaps, or a label is not ours.
    """
    starts: list[tuple[int, PolicyVersion]] = []
    covered = 0
    for span in spans:
        if span["start"] != covered or span["end"] <= span["start"]:
            raise EngineError(f"weight versions have a gap or overlap: {list(spans)}")
        covered = span["end"]
        try:
            version = parse_label(span["version"])
        except ProtocolError as error:
            raise EngineError(str(error)) from error
        if not starts or starts[-1][1] != version:
            starts.append((span["start"], version))
    if covered != num_tokens:
        raise EngineError(f"weight versions cover {covered} of {num_tokens} tokens")
    return starts


def version_runs(
    starts: Sequence[tuple[int, PolicyVersion]], *, num_prompt_tokens: int
) -> tuple[VersionRun, ...]:
    """Shift runs over the response to runs over prompt and response."""
    return tuple(VersionRun(num_prompt_tokens + first, version) for first, version in starts)
