"""Valid values of algo.teacher.endpoint, without torch: invalid ones are refused before a start."""

from urllib.parse import urlsplit

from slipstream.wire.errors import ConfigError


def refuse_no_address(endpoint: str) -> None:
    """Refuse an invalid server address.

    Raises:
        ConfigError: the address is invalid; the message has the reason, but no password.
    """
    try:
        parts = urlsplit(endpoint)
        host = parts.hostname or ""
        host.encode("idna")
        is_whole = parts.port != 0 and endpoint.split() == [endpoint]
    except ValueError as error:
        raise ConfigError(f"algo.teacher.endpoint is no address: {error}") from error
    if parts.scheme not in {"http", "https"} or not host or "@" in parts.netloc:
        raise ConfigError(
            "algo.teacher.endpoint must be http:// or https:// and a host, without a user, got "
            f"{parts.scheme or 'no scheme'} and {host or 'no host'}"
        )
    if not is_whole or parts.query or parts.fragment:
        raise ConfigError(
            "algo.teacher.endpoint must be http:// or https:// and a host, with a port above 0, "
            "and no white space, query or fragment after it"
        )
