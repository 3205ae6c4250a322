from pathlib import Path
from typing import Any, cast

from slipstream.generators.sglang.process import SglangProcess, reason_in


def test_what_is_printed_of_a_server_holds_no_key():
    server = SglangProcess(cast("Any", None), "http://h:1", "s3cret", Path("log"), Path("scratch"))
    assert server.api_key == "s3cret"
    assert "s3cret" not in repr(server)


def test_the_error_of_a_child_is_why_a_server_ended():
    for log, reason in [
        (
            "Traceback ...\nKeyError: 'added_tokens'\n\n[08:02] Received sigquit from a child\n",
            "KeyError: 'added_tokens'",
        ),
        ("a\ntorch.OutOfMemoryError: full\nb\n", "torch.OutOfMemoryError: full"),
        ("loading\nunknown flag\n\n", "unknown flag"),
        ("", "it printed nothing"),
    ]:
        assert reason_in(log) == reason
