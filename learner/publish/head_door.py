"""Address of the head relay, posted by rank 0 for the first ranks of the other hosts."""

import msgspec
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # not in the stubs

from slipstream.wire.errors import PublishError
from slipstream.wire.messages.weightbus import RelayAddress

_KEY = "head"


class HeadDoor:
    """The posted address. A new head has a new address."""

    def __init__(self, store: Store) -> None:
        """Take a client of the store that the ranks share; only this object may use the client."""
        self._store = PrefixStore("weights", store)

    def post(self, door: RelayAddress) -> None:
        """Show the address to the others. Blocks; any thread.

        Raises:
            PublishError: the store is gone, and with it rank 0 of the learner.
        """
        try:
            self._store.set(_KEY, msgspec.json.encode(door).decode())
        except RuntimeError as error:
            raise PublishError(f"the ranks' store is gone: {error}") from error

    def read(self) -> RelayAddress | None:
        """Return the posted address, if any. Blocks; any thread.

        Raises:
            PublishError: the store is gone.
        """
        try:
            if not self._store.check([_KEY]):
                return None
            return msgspec.json.decode(self._store.get(_KEY), type=RelayAddress)
        except RuntimeError as error:
            raise PublishError(f"the ranks' store is gone: {error}") from error
