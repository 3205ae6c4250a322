from pathlib import Path

from slipstream.deploy.launch.rotation import rotate
from slipstream.wire.settings.sections import LoggingSection

MIB = 1 << 20


def test_a_large_log_begins_anew_and_the_process_goes_on_writing(tmp_path: Path):
    settings = LoggingSection(rotate_mb=1, keep_logs=2)
    path = tmp_path / "broker.log"
    small = tmp_path / "relay.log"
    small.write_bytes(b"s" * MIB)
    with path.open("ab", buffering=0) as log:
        for number in range(4):
            log.write(b"%d" % number * MIB)
            assert rotate(tmp_path, settings) == ([path] if number else [])
            log.write(b"x")
        assert path.read_bytes() == b"x"
    assert (tmp_path / "broker.log.1").read_bytes() == b"x" + b"3" * MIB
    assert (tmp_path / "broker.log.2").read_bytes() == b"x" + b"2" * MIB
    assert {one.name for one in tmp_path.iterdir()} == {
        "broker.log",
        "broker.log.1",
        "broker.log.2",
        "relay.log",
    }


def test_without_a_limit_a_log_grows(tmp_path: Path):
    (tmp_path / "broker.log").write_bytes(b"x" * (2 * MIB))
    assert rotate(tmp_path, LoggingSection(rotate_mb=0)) == []
