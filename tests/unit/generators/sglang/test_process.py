from pathlib import Path
from typing import Any, cast

from slipstream.generators.sglang.process import SglangProcess


def test_what_is_printed_of_a_server_holds_no_key():
    server = SglangProcess(cast("Any", None), "http://h:1", "s3cret", Path("log"), Path("scratch"))
    assert server.api_key == "s3cret"
    assert "s3cret" not in repr(server)
