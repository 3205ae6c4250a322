"""One role on a host of a cluster, over short real processes."""

import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from slipstream.broker.server.keyring import holders
from slipstream.deploy.launch.cluster.host_program import HostProgram
from slipstream.deploy.launch.cluster.role_host import (
    PYTHON,
    SETTINGS,
    HostFacts,
    RoleHost,
    RoleState,
    StartRole,
)
from slipstream.deploy.launch.plan import RolePlan
from slipstream.wire.files.keys import ClientKey
from slipstream.wire.messages.broker import Role
from tests.support.waiting import HANG_S

ROLES: tuple[Role, ...] = ("generator", "learner")
SHOW = """
import json, os, sys
print(json.dumps({"arguments": sys.argv[1:], "folder": os.getcwd(), "x": os.environ.get("X"),
    "settings": open(sys.argv[1]).read(), "pid": os.getpid()}), flush=True)
"""


ASKED = """
import os, sys, time
for line in sys.stdin:
    print("a warning\\n# row 7", file=sys.stderr, flush=True)
    while not os.path.exists("told"):
        time.sleep(0.01)
    print(line, end="", flush=True)
"""


def test_what_a_program_is_about_is_told_while_it_works(tmp_path: Path):
    (tmp_path / "asked.py").write_text(ASKED)
    told: list[str] = []

    def progress(what: str) -> None:
        told.append(what)
        (tmp_path / "told").touch()

    program = HostProgram("asked", folder=tmp_path, progress=progress)
    try:
        assert program.ask(b"{}", HANG_S) == b"{}\n"
    finally:
        program.close()
    assert set(told) == {"row 7"}


@pytest.fixture
def host() -> Iterator[RoleHost]:
    host = RoleHost()
    yield host
    host.close()


def role(code: str, *, folder: str = "", key: ClientKey | None = None, name: str = "w") -> bytes:
    request = StartRole(
        plan=RolePlan(name, (PYTHON, "-S", "-c", code, SETTINGS), environment={"X": "handed on"}),
        settings="[run]\n",
        folder=folder,
        key=key,
    )
    return msgspec.json.encode(request)


def followed(host: RoleHost, offset: int = 0) -> tuple[RoleState, str]:
    """Observe until it has ended; return the last answer and what was logged."""
    log = b""
    while True:
        answer, text = host.observe(offset + len(log), 0.5)
        log += text
        seen = msgspec.json.decode(answer, type=RoleState)
        if seen.code is not None and not text:
            return seen, log.decode()


def test_a_role_gets_settings_arguments_environment_and_folder(host: RoleHost, tmp_path: Path):
    pid = host.start(role(SHOW, folder=str(tmp_path)))
    seen, log = followed(host)
    shown = json.loads(log)
    assert seen.code == 0
    assert shown["pid"] == pid
    found = (shown["folder"], shown["x"], shown["settings"])
    assert found == (str(tmp_path), "handed on", "[run]\n")
    settings, sockets = shown["arguments"]
    assert Path(settings).stat().st_mode & 0o077 == 0
    assert sockets == f"run.socket_dir={host.scratch / 'sockets'}"


def test_a_key_is_in_memory_and_for_its_role_alone():
    host = RoleHost()
    key = ClientKey(name="n", role="generator", public="p" * 40, secret="s" * 40, broker="b" * 40)
    code = "import sys; print(open(sys.argv[3].partition('=')[2]).read(), sys.argv[3], flush=True)"
    host.start(role(code, key=key))
    _, log = followed(host)
    assert f'secret = "{key.secret}"' in log
    path = Path(log.split("run.key_file=")[1].strip())
    assert path.is_relative_to("/dev/shm")  # noqa: S108
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    host.close()
    assert not path.parent.exists()
    assert not host.scratch.exists()


def test_what_a_role_logs_and_its_last_words_come_once(host: RoleHost):
    host.start(role("print('one', flush=True); raise SystemExit(7)"))
    seen, log = followed(host)
    assert (seen.code, log) == (7, "one\n")
    host.start(role("print('two', flush=True)"))
    again, log = followed(host, seen.signs.log_bytes)
    assert (again.code, log) == (0, "two\n")


def test_a_role_is_sent_signals_and_shows_signs_of_life(host: RoleHost):
    host.start(role("print('up', flush=True)\nwhile True: pass"))
    seen = msgspec.json.decode(host.observe(0, 100.0)[0], type=RoleState)
    while seen.signs.cpu_s == 0 or seen.signs.log_bytes == 0:
        seen = msgspec.json.decode(host.observe(seen.signs.log_bytes, 0.01)[0], type=RoleState)
    assert seen.code is None
    host.signal(signal.SIGTERM)
    assert followed(host)[0].code == -signal.SIGTERM


def test_closing_ends_the_role_and_what_it_left():
    host = RoleHost(end_s=0.2)
    code = """
import subprocess, sys
sleep = [sys.executable, "-c", "import time; time.sleep(1000)"]
lost = subprocess.Popen(sleep, start_new_session=True)
print(lost.pid, flush=True)
"""
    host.start(role(code))
    _, log = followed(host)
    assert psutil.pid_exists(int(log))
    host.close()
    assert not psutil.pid_exists(int(log))


def test_folders_of_a_host_that_was_killed_are_removed_by_the_next(tmp_path: Path):
    child = os.fork()
    if child == 0:
        killed = RoleHost()
        (tmp_path / "folders").write_text(f"{killed.scratch}\n{killed._memory}")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    left = [Path(line) for line in (tmp_path / "folders").read_text().splitlines()]
    assert all(folder.is_dir() for folder in left)
    host = RoleHost()
    try:
        assert not any(folder.exists() for folder in left)
        assert host.scratch.is_dir()
        other = RoleHost()  # the first one lives
        assert host.scratch.is_dir()
        other.close()
    finally:
        host.close()


def test_a_host_finds_neighboring_free_ports_and_says_what_it_sees(host: RoleHost, tmp_path: Path):
    port = host.free_port("127.0.0.1", 2)
    for number in (port, port + 1):
        with socket.socket() as one:
            one.bind(("127.0.0.1", number))
    assert not msgspec.json.decode(host.facts(str(tmp_path / "no")), type=HostFacts).sees
    (tmp_path / "yes").touch()
    assert msgspec.json.decode(host.facts(str(tmp_path / "yes")), type=HostFacts).sees


CAP_SYS_NICE = 23
TAKES_NICENESS = """
import os, sys, threading
from slipstream.deploy.launch.cluster.role_host import take_niceness
os.nice(3)
has_taken = threading.Event()
def show():
    has_taken.wait()
    sys.stdout.write(f"{os.getpriority(os.PRIO_PROCESS, 0)} ")  # in one piece
before = threading.Thread(target=show)
before.start()
take_niceness(os.getppid())
after = threading.Thread(target=show)
after.start()
has_taken.set()
"""


def test_the_threads_of_a_host_take_the_niceness_of_its_parent_where_they_may():
    """Workers of Ray have niceness 15; beside others that compute, a role of theirs starves."""
    done = subprocess.run([sys.executable, "-c", TAKES_NICENESS], capture_output=True, check=True)
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    (rights,) = re.findall(r"CapEff:\s*(\w+)", Path("/proc/self/status").read_text())
    may_lower = int(rights, 16) >> CAP_SYS_NICE & 1
    assert list(map(int, done.stdout.split())) == [mine + 3 * (not may_lower)] * 2


def test_keys_are_authorized_and_their_secrets_are_in_no_file(host: RoleHost, tmp_path: Path):
    folder = tmp_path / "keys"
    made = [host.make_key(str(folder), f"a.{role}", role) for role in ROLES]
    keys = [msgspec.json.decode(key, type=ClientKey) for key in made]
    assert {holder.public for holder in holders(folder)} == {key.public for key in keys}
    again = host.make_key(str(folder), "a.generator", "generator")
    anew = msgspec.json.decode(again, type=ClientKey)
    assert anew.public != keys[0].public
    assert anew.public in {holder.public for holder in holders(folder)}
    assert keys[0].public not in {holder.public for holder in holders(folder)}
    files = [path.read_text() for path in folder.rglob("*") if path.is_file()]
    assert not [text for text in files for key in (*keys, anew) if key.secret in text]


def test_requests_and_answers_are_json(host: RoleHost):
    assert json.loads(role("pass"))["plan"]["name"] == "w"
    host.start(role("pass"))
    assert json.loads(host.observe(0, 100.0)[0]).keys() >= {"code", "words", "sockets"}
