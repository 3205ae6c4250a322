from pathlib import Path

import pytest

from slipstream.wire.errors import ImageError
from slipstream.wire.files.image_folder import ImageFolder
from slipstream.wire.messages.images import digest_of


def test_what_is_kept_is_read_or_an_error(tmp_path: Path):
    images = ImageFolder(tmp_path / "images", most_bytes=10)
    digest = images.keep(b"four", durable=True)
    assert (digest, images.read(digest)) == (digest_of(b"four"), b"four")
    with pytest.raises(ImageError, match=f"no image {'0' * 8}"):
        images.read("0" * 64)
    with pytest.raises(ImageError, match=r"take 4 bytes, and may take 10 \(broker\.image_budget"):
        images.keep(b"seven!!")
    images.file_of(digest).write_bytes(b"FOUR")
    with pytest.raises(ImageError, match="changed on disk: its bytes are those of another image"):
        images.read(digest)


@pytest.mark.parametrize("left", [b"", b"\0\0\0\0\0"])
def test_an_image_that_was_not_finished_is_written_again(left: bytes, tmp_path: Path):
    digest = ImageFolder(tmp_path).keep(b"whole")
    file = ImageFolder(tmp_path).file_of(digest)
    file.write_bytes(left)  # after a power failure
    again = ImageFolder(tmp_path, most_bytes=5)
    again.keep(b"whole")
    assert again.read(digest) == b"whole"
    before = file.stat().st_mtime_ns
    again.keep(b"whole")
    assert file.stat().st_mtime_ns == before, "it was written twice"
    file.unlink()
    again.keep(b"whole")
    assert again.read(digest) == b"whole"
