"""Pure: versions of adapters in an engine, the answers that use them, and those that may go."""

from collections.abc import Iterator
from contextlib import contextmanager

from slipstream.wire.messages.versions import PolicyVersion


class AdapterVersions:
    """The versions that an engine has loaded.

    The newest ``kept`` adopted versions stay. An older one stays while an answer uses it: requests
    in flight bound their number.
    """

    def __init__(self, kept: int) -> None:
        """Begin without a version; ``kept`` is at least 1."""
        self._kept = kept
        self._uses: dict[PolicyVersion, int] = {}  # answers in flight of each loaded version
        self._adopted: list[PolicyVersion] = []  # adopted versions, oldest first

    @property
    def newest(self) -> PolicyVersion | None:
        """The version that new requests use."""
        return self._adopted[-1] if self._adopted else None

    @property
    def loaded(self) -> tuple[PolicyVersion, ...]:
        """All loaded versions, in the order of loading."""
        return tuple(self._uses)

    @property
    def staying(self) -> tuple[PolicyVersion, ...]:
        """Loaded versions that must stay; others may be half unloaded."""
        going = self.unneeded()
        return tuple(version for version in self._uses if version not in going)

    def load(self, version: PolicyVersion) -> None:
        """Record a loaded version, which no request uses yet."""
        self._uses[version] = 0

    def adopt(self, version: PolicyVersion) -> None:
        """Use a loaded version for new requests.

        Raises:
            ValueError: it is not loaded.
        """
        if version not in self._uses:
            raise ValueError(f"{version.label} is not loaded")
        if version in self._adopted:
            self._adopted.remove(version)
        self._adopted.append(version)

    def drop(self, version: PolicyVersion) -> None:
        """Record that a version was unloaded."""
        self._uses.pop(version, None)
        if version in self._adopted:
            self._adopted.remove(version)

    @contextmanager
    def used(self, version: PolicyVersion, count: int) -> Iterator[None]:
        """Keep a version while ``count`` answers use it."""
        self._uses[version] += count
        try:
            yield
        finally:
            self._uses[version] -= count

    def unneeded(self) -> list[PolicyVersion]:
        """Return the adopted versions that may go: older than the ``kept`` ones, and unused."""
        return [version for version in self._adopted[: -self._kept] if not self._uses[version]]
