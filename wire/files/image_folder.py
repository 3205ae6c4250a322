"""Images of a run, a file each, named by the digest of its bytes."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from slipstream.wire.errors import ImageError
from slipstream.wire.files.replace import is_unfinished, replace_file
from slipstream.wire.messages.images import digest_of


@dataclass(slots=True)
class _Kept:
    sizes: dict[str, int]  # bytes of each image that is there, by digest
    num_bytes: int


class ImageFolder:
    """Keeps each image once; what is read is what was kept, or an error."""

    def __init__(self, path: Path, *, most_bytes: int = 1 << 62) -> None:
        """Use a folder, which need not be there yet, for up to ``most_bytes`` of images."""
        self._path = path
        self._most_bytes = most_bytes

    def file_of(self, digest: str) -> Path:
        """Return the file of an image, which need not be there."""
        return self._path / digest[:2] / digest

    def keep(self, content: bytes, *, durable: bool = False) -> str:
        """Keep an image and return its digest; ``durable``: it is on disk once this returns.

        Raises:
            ImageError: there is no room.
        """
        digest = digest_of(content)
        kept = self._kept
        known = kept.sizes.get(digest, 0)
        file = self.file_of(digest)
        if known == len(content) and _holds(file, content):  # a power failure leaves anything
            return digest
        if kept.num_bytes - known + len(content) > self._most_bytes:
            raise ImageError(
                f"images of the run take {kept.num_bytes:,} bytes, and may take "
                f"{self._most_bytes:,} (broker.image_budget_bytes)"
            )
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            replace_file(file, content, durable=durable)
        except OSError as error:
            raise ImageError(f"cannot write {file}: {error.strerror or error}") from error
        kept.num_bytes += len(content) - known
        kept.sizes[digest] = len(content)
        return digest

    @cached_property
    def _kept(self) -> "_Kept":
        files = (file for file in self._path.glob("??/*") if not is_unfinished(file.name))
        sizes = {file.name: file.lstat().st_size for file in files}
        return _Kept(sizes, sum(sizes.values()))

    def read(self, digest: str) -> bytes:
        """Return the bytes of an image.

        Raises:
            ImageError: it is not there, cannot be read, or is not what was kept.
        """
        file = self.file_of(digest)
        try:
            content = file.read_bytes()
        except FileNotFoundError:
            raise ImageError(f"no image {digest[:8]} in {self._path}") from None
        except OSError as error:
            raise ImageError(f"cannot read {file}: {error.strerror or error}") from error
        if digest_of(content) != digest:
            raise ImageError(f"{file} changed on disk: its bytes are those of another image")
        return content


def _holds(file: Path, content: bytes) -> bool:
    try:
        return file.read_bytes() == content
    except OSError:
        return False
