import pytest

from slipstream.broker.sandbox.console import ShortenedOutput

MARK = b"\0end\0"


@pytest.mark.parametrize("size", [1, 3, 5, 1000])
def test_output_is_complete_at_its_mark_however_it_is_cut(size: int):
    output = ShortenedOutput(8, MARK)
    written = b"abcdefghijklmnopqrstuvwxyz" + MARK
    for start in range(0, len(written), size):
        assert not output.is_complete
        output.add(written[start : start + size])
    assert output.is_complete
    assert output.text == "abcd\n... 18 bytes are left out ...\nwxyz"


@pytest.mark.parametrize("written", [b"", b"a", b"abcd", b"abcde", b"abcdefgh"])
def test_output_within_its_size_is_kept_whole(written: bytes):
    output = ShortenedOutput(8, MARK)
    for byte in written + MARK:
        output.add(bytes([byte]))
    assert output.is_complete
    assert output.text == written.decode()


def test_what_is_no_text_is_replaced():
    output = ShortenedOutput(100, MARK)
    output.add(b"\xff" + MARK)
    assert output.text == "�"
