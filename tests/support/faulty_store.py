"""Storage in memory that fails as it is told to: ``faulty://``."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from uuid import uuid4

import fsspec
from fsspec.implementations.memory import MemoryFileSystem


def nothing(_path: str) -> None:
    return None


class FaultyStore(MemoryFileSystem):
    """Calls a hook before each download or upload; it may raise, or change the store."""

    protocol = "faulty"
    before_get: Callable[[str], object] = staticmethod(nothing)
    before_put: Callable[[str], object] = staticmethod(nothing)

    def get_file(self, rpath: str, lpath: str, **options: object) -> None:
        self.before_get(rpath)
        super().get_file(rpath, lpath, **options)

    def put_file(self, lpath: str, rpath: str, **options: object) -> None:
        self.before_put(rpath)
        super().put_file(lpath, rpath, **options)


fsspec.register_implementation("faulty", FaultyStore)


@contextmanager
def faulty_folder() -> Iterator[str]:
    """Yield the URL of an empty folder; hooks that are set meanwhile are taken off again."""
    try:
        yield f"faulty://{uuid4().hex}"
    finally:
        FaultyStore.before_get = FaultyStore.before_put = staticmethod(nothing)
