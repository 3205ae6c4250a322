"""Access to the page: its token and port, kept over restarts."""

import hashlib
import logging
import re
import secrets
import stat
from pathlib import Path

from slipstream.wire.files.keys import write_private
from slipstream.wire.files.run_folder import PAGE_PORT, PAGE_TOKEN

_log = logging.getLogger(__name__)
_TOKEN = re.compile(r"[A-Za-z0-9_-]{16,64}")
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_MAX_PORT = 65_535


class PageAccess:
    """The token of a page, and the port that it was served at before."""

    def __init__(self, folder: Path | None) -> None:
        """Reuse token and port of a run folder, if any, so that an open page reconnects."""
        self._folder = folder
        self._token = (_kept_token(folder) if folder else "") or secrets.token_urlsafe(16)
        self.port = _kept_port(folder) if folder else 0  # 0 if none is kept

    @property
    def token(self) -> str:
        """Token that a request must carry."""
        return self._token

    @property
    def cookie(self) -> str:
        """Value that a browser keeps in its place; the token is not known by it.

        A browser sends cookies to what listens at other ports of this host, too.
        """
        return hashlib.blake2b(b"cookie", key=self._token.encode(), digest_size=24).hexdigest()

    def keep(self, port: int) -> None:
        """Write the token and the port down."""
        self.port = port
        if self._folder is None:
            return
        try:
            (self._folder / PAGE_TOKEN).parent.mkdir(parents=True, exist_ok=True)
            write_private(self._folder / PAGE_TOKEN, self._token)
            write_private(self._folder / PAGE_PORT, str(port))
        except OSError as error:
            _log.warning(
                "the page will have another address after a restart: %s in %s",
                error.strerror,
                self._folder,
            )


def _kept_token(folder: Path) -> str:
    """Return the token that is kept; empty without one, or if others could read it."""
    path = folder / PAGE_TOKEN
    try:
        text = "" if path.stat().st_mode & _OTHERS else path.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
    return text if _TOKEN.fullmatch(text) else ""


def _kept_port(folder: Path) -> int:
    try:
        text = (folder / PAGE_PORT).read_text("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return 0
    return int(text) if text.isdecimal() and len(text) <= 5 and int(text) <= _MAX_PORT else 0
