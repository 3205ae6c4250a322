"""Storage in memory that fails as it is told to: ``faulty://``."""

from collections.abc import Callable

import fsspec
from fsspec.implementations.memory import MemoryFileSystem


def nothing(_path: str) -> None:
    return None


class FaultyStore(MemoryFileSystem):
    """Calls a hook before each download or upload; the hook may raise, or change the store."""

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
