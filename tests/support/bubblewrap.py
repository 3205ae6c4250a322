"""Whether bubblewrap can start here."""

from slipstream.broker.sandbox.sandbox import SandboxUnavailableError, check_jail


def bubblewrap_works() -> bool:
    try:
        check_jail()
    except SandboxUnavailableError:
        return False
    return True
