from pathlib import Path

from slipstream.deploy.launch.rotation import rotate


def test_a_large_log_begins_anew_and_the_process_goes_on_writing(tmp_path: Path):
    path = tmp_path / "broker.log"
    small = tmp_path / "relay.log"
    small.write_bytes(b"1234567890")
    with path.open("ab", buffering=0) as log:
        for number in range(4):
            log.write(b"%d" % number * 11)
            assert rotate(tmp_path, max_bytes=10, keep=2) == [path]
            log.write(b"x")
        assert path.read_bytes() == b"x"
    assert (tmp_path / "broker.log.1").read_bytes() == b"x" + b"3" * 11
    assert (tmp_path / "broker.log.2").read_bytes() == b"x" + b"2" * 11
    assert {one.name for one in tmp_path.iterdir()} == {
        "broker.log",
        "broker.log.1",
        "broker.log.2",
        "relay.log",
    }


def test_without_a_limit_a_log_grows(tmp_path: Path):
    (tmp_path / "broker.log").write_bytes(b"1234567890")
    assert rotate(tmp_path, max_bytes=0, keep=1) == []
