"""A Redis of the user's own: an ACL user, and TLS."""

import asyncio
import gc
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.broker.store.base import Changes
from slipstream.broker.store.redis import RedisStore
from slipstream.wire.errors import ConfigError
from slipstream.wire.process.ports import free_port
from tests.support.waiting import HANG_S, until

pytestmark = [pytest.mark.integration, pytest.mark.redis]
RULES = "on >secret-of-the-user ~slipstream:* +@all -@dangerous +info +config|get"


def make_certificates(folder: Path, address: str = "127.0.0.1") -> None:
    """A certificate authority, and a server's certificate for an address."""
    if shutil.which("openssl") is None:
        pytest.skip("TLS needs the command openssl to make certificates")

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    openssl(
        *("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=authority"),
        *("-keyout", "ca.key", "-out", "ca.crt"),
    )
    openssl(
        *("req", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=redis"),
        *("-keyout", "server.key", "-out", "server.csr"),
    )
    (folder / "names").write_text(f"subjectAltName=IP:{address}\n")
    openssl(
        *("x509", "-req", "-in", "server.csr", "-CA", "ca.crt", "-CAkey", "ca.key"),
        *("-CAcreateserial", "-days", "2", "-extfile", "names", "-out", "server.crt"),
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A Debian redis-server that uses TLS only, with one user of few rights."""
    binary = shutil.which("redis-server")
    if binary is None:
        pytest.skip("needs a redis-server with TLS on PATH")
    folder = tmp_path_factory.mktemp("redis")
    make_certificates(folder)
    while (started := start(binary, folder, free_port())) is None:
        pass  # somebody else took the port
    process, url = started
    try:
        yield url, folder
    finally:
        process.terminate()
        process.wait(HANG_S)


def start(binary: str, folder: Path, port: int) -> tuple[subprocess.Popen[bytes], str] | None:
    """Start a server; None if the port is taken."""
    (folder / "redis.conf").write_text(
        f"port 0\ntls-port {port}\nbind 127.0.0.1\ndir {folder}\n"
        f"tls-cert-file {folder}/server.crt\ntls-key-file {folder}/server.key\n"
        f"tls-ca-cert-file {folder}/ca.crt\n"
        "tls-auth-clients no\nappendonly yes\nappendfsync always\n"
        f"user default off\nuser slipstream {RULES}\n"
    )
    log = folder / "redis.log"
    with log.open("wb") as file:
        process = subprocess.Popen([binary, str(folder / "redis.conf")], stdout=file, stderr=file)
    until(lambda: b"Ready to accept" in log.read_bytes() or process.poll() is not None)
    if process.poll() is None:
        return process, f"rediss://127.0.0.1:{port}"
    text = log.read_text()
    if "Address already in use" in text:
        return None
    if "tls-port" in text:
        pytest.skip("this redis-server was built without TLS")
    raise AssertionError(text)


async def test_a_store_works_over_tls_with_the_rights_that_the_document_grants(
    server: tuple[str, Path],
):
    url, folder = server
    documented = Path(__file__).parents[2].joinpath("docs", "security.md").read_text()
    assert RULES.replace("secret-of-the-user", "PASSWORD") in documented

    store = await RedisStore.connect(
        url,
        "run",
        username="slipstream",
        password="secret-of-the-user",  # noqa: S106 of this test's server
        ca_file=str(folder / "ca.crt"),
    )
    try:
        generation = await store.claim()
        await store.commit(Changes(snapshot=b"state"))
        found = generation, await store.snapshot(), await store.durability()
    finally:
        await store.close()
    assert found == (1, b"state", "appendfsync always")


# asyncio leaves a connection whose TLS handshake failed to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("username", "password", "trusts", "why"),
    [
        ("slipstream", "wrong", True, "WRONGPASS|invalid username-password"),
        (None, "secret-of-the-user", True, "WRONGPASS|invalid username-password|NOAUTH|disabled"),
        ("slipstream", "secret-of-the-user", False, "CERTIFICATE_VERIFY_FAILED"),
    ],
    ids=["password", "no-user", "unknown-authority"],
)
def test_client_without_credentials_is_refused_and_no_secret_is_printed(
    server: tuple[str, Path], username: str | None, password: str, trusts: bool, why: str
):
    url, folder = server
    connecting = RedisStore.connect(
        url,
        "run",
        username=username,
        password=password,
        ca_file=str(folder / "ca.crt") if trusts else None,
    )
    with pytest.raises(ConfigError, match=why) as caught:
        asyncio.run(connecting)
    assert password not in str(caught.value)
    del caught
    gc.collect()  # here, and not in whatever test comes next


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer every command as carried out, which is all that a client asks of a PING."""
    while line := await reader.readline():
        if line.startswith(b"*"):  # its arguments follow
            writer.write(b"+OK\r\n")
    writer.close()


# As above.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("address", "is_let_in"), [("127.0.0.1", True), ("192.0.2.1", False)])
def test_a_server_has_to_prove_the_name_that_it_is_called_by(
    tmp_path: Path, address: str, is_let_in: bool
):
    make_certificates(tmp_path, address)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / "server.crt", tmp_path / "server.key")

    async def body() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
        port = server.sockets[0].getsockname()[1]
        try:
            url, trusted = f"rediss://127.0.0.1:{port}", str(tmp_path / "ca.crt")
            store = await RedisStore.connect(url, "run", ca_file=trusted)
            await store.close()
        finally:
            server.close()

    if is_let_in:
        asyncio.run(body())
    else:
        with pytest.raises(ConfigError, match=r"CERTIFICATE_VERIFY_FAILED.*IP address mismatch"):
            asyncio.run(body())
    gc.collect()
