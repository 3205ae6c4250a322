"""No secret of a child is where others on the machine, or readers of its log, would see it."""

import asyncio
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from slipstream.broker.store.private_server import RedisServer
from tests.support.waiting import until

pytestmark = pytest.mark.integration


def shown(pid: int) -> str:
    """Return arguments and environments of a process and all that it has started."""
    texts = []
    root = psutil.Process(pid)
    for process in [root, *root.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            texts += [*process.cmdline(), str(process.environ())]
    assert texts
    return "\n".join(texts)


def test_the_password_of_the_private_redis(short_folder: Path):
    socket, log = short_folder / "redis.sock", short_folder / "redis.log"
    server = RedisServer.launch(
        socket=socket, folder=short_folder / "redis", log_file=log, fsync="always"
    )
    try:
        asyncio.run(server.until_listening(socket))
        assert server.password not in shown(server.process.pid)
        files = [path for path in short_folder.rglob("*") if path.is_file()]
        assert log in files
        assert not [path for path in files if server.password.encode() in path.read_bytes()]
        assert server.password not in repr(server)
    finally:
        server.stop()


def test_files_of_the_private_redis_are_readable_by_their_owner_only(short_folder: Path):
    folder, socket = short_folder / "redis", short_folder / "redis.sock"
    folder.mkdir(mode=0o755)  # as a version before left it
    server = RedisServer.launch(
        socket=socket, folder=folder, log_file=short_folder / "redis.log", fsync="always"
    )
    try:
        asyncio.run(server.until_listening(socket))
        until(lambda: list(folder.rglob("*.aof.manifest")), "its first files")
        until(lambda: not list(folder.rglob("temp-*")), "its temporary files")
        files = [path for path in folder.rglob("*") if path.is_file()]
        open_to_others = [path for path in (folder, *files) if path.stat().st_mode & 0o077]
        assert not open_to_others
    finally:
        server.stop()
