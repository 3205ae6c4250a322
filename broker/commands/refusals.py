"""Why a tenant's request is refused, with the status of HTTP that says so."""

from slipstream.wire.errors import RefusedError


class RequestRefusedError(RefusedError):
    """A tenant's request that is not carried out: nothing has changed.

    Statuses: 400 it is wrong; 401 no such key; 404 there is no such thing of this tenant's; 410 it
    is gone for good; 429 a quota is full, come again later.
    """

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
