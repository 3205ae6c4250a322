"""Pure: which versions of adapters an engine has, which answers use them, which may go."""

from collections.abc import Iterator
from contextlib import contextmanager

from slipstream.wire.messages.versions import PolicyVersion


class AdapterVersions:
    """The versions that an engine has loaded.

    The newest ``kept`` adopted ones stay. An older one stays while an answer uses it: requests that
    are in flight bound how many these are.
    """

    def __init__(self, kept: int) -> None:
        """Begin without a version; at least one is ``kept``."""
        self._kept = kept
        self._uses: dict[PolicyVersion, int] = {}  # answers in flight, of all that are loaded
        self._adopted: list[PolicyVersion] = []  # of these, oldest first

    @property
    def newest(self) -> PolicyVersion | None:
        """The version that new requests use."""
        return self._adopted[-1] if self._adopted else None

    @property
    def loaded(self) -> tuple[PolicyVersion, ...]:
        """All versions that the engine has, in the order in which they were loaded."""
        return tuple(self._uses)

    @property
    def staying(self) -> tuple[PolicyVersion, ...]:
        """Loaded versions that may not go; of the others some may be half unloaded."""
        going = self.unneeded()
        return tuple(one for one in self._uses if one not in going)

    def load(self, version: PolicyVersion) -> None:
        """The engine has a version, which no request uses yet."""
        self._uses[version] = 0

    def adopt(self, version: PolicyVersion) -> None:
        """New requests use a version that is loaded.

        Raises:
            ValueError: it is not.
        """
        if version not in self._uses:
            raise ValueError(f"{version.label} is not loaded")
        if version in self._adopted:
            self._adopted.remove(version)
        self._adopted.append(version)

    def drop(self, version: PolicyVersion) -> None:
        """The engine has a version no more."""
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
        """Return the adopted versions that may go: older than those that stay, and unused."""
        return [one for one in self._adopted[: -self._kept] if not self._uses[one]]
