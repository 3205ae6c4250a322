"""Whether bubblewrap can start here."""

from slipstream.broker.sandbox.bubblewrap import SandboxUnavailableError
from slipstream.broker.sandbox.jail import check_jail


def bubblewrap_works() -> bool:
    try:
        check_jail()
    except SandboxUnavailableError:
        return False
    return True
