"""What `ray status` without a token says about a cluster."""

import pytest

from slipstream.deploy.launch.cluster.ray_token import refusal_of

HEAD = "10.0.0.1:6379"


@pytest.mark.parametrize(
    ("code", "words", "expected"),
    [
        (1, "x\nray.exceptions.AuthenticationError: RPC error: InvalidAuthToken: ...", ""),
        (0, "", f"{HEAD}, the head of the Ray cluster, answers without a token"),
        (0, "a warning of AuthenticationError", "answers without a token"),
        (1, "x\nConnectionError: gone\n", "does not say that it wants a token (ConnectionError: "),
        (-9, "", "does not say that it wants a token (exit code -9)"),
        (None, "silence for 600 s", "does not say that it wants a token (silence for 600 s)"),
    ],
)
def test_a_head_is_refused_unless_it_wants_a_token(code: int | None, words: str, expected: str):
    refusal = refusal_of(HEAD, code, words)
    assert expected in refusal
    assert bool(refusal) == bool(expected) == ("deploy.ray.require_token = false" in refusal)
