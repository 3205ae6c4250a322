import contextlib
import gc
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest

from slipstream.broker.sandbox import sandbox
from slipstream.broker.sandbox.bubblewrap import SandboxUnavailableError
from slipstream.broker.sandbox.jail import jailed
from slipstream.broker.sandbox.sandbox import Limits, ProgramOutcome
from tests.support.bubblewrap import bubblewrap_works
from tests.support.processes import adopted_orphans
from tests.support.waiting import HANG_S, until

pytestmark = pytest.mark.integration
needs_namespaces = pytest.mark.usefixtures("_namespaces")

SMALL = Limits(own_s=HANG_S, cpu_s=HANG_S, memory_bytes=96 << 20, max_processes=12)
IMPATIENT = replace(SMALL, own_s=1.0, cpu_s=0.5)
NOBODY = 65534
LEFT = Path(f"/tmp/left-by-code-{os.getpid()}")  # noqa: S108 what the code in DAEMON writes
ROOT = Path(sandbox.__file__).parents[2]
COPIED = (
    "wire/__init__.py",
    "wire/errors.py",
    "broker/__init__.py",
    "broker/rewards/__init__.py",
    "broker/sandbox/__init__.py",
    "broker/sandbox/bubblewrap.py",
    "broker/sandbox/init.py",
    "broker/sandbox/charged_time.py",
    "broker/sandbox/process_table.py",
    "broker/sandbox/run_usage.py",
    "broker/sandbox/sandbox.py",
    "broker/sandbox/system_calls.py",
)
SERVED = """
import json, sys
from base64 import b64decode, b64encode
from dataclasses import asdict, replace
from slipstream.broker.sandbox import sandbox
asked = json.load(sys.stdin)
outcome = asdict(sandbox.run(
    asked["source"], stdin=b64decode(asked["stdin"]), limits=sandbox.Limits(**asked["limits"])
))
print(json.dumps(outcome | {k: b64encode(outcome[k]).decode() for k in ("stdout", "stderr")}))
"""
Runner = Callable[..., ProgramOutcome]
# Where other tests mount file systems, some of them beside these.
OF_OTHER_TESTS = (tempfile.gettempdir(), "/run/netns", "/var/run/netns")


def descendants() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


@pytest.fixture
def _namespaces() -> None:
    if not bubblewrap_works():
        pytest.skip("bubblewrap does not work here")


@pytest.fixture(scope="module")
def own_temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder that every user may read."""
    tmp_path_factory.getbasetemp()  # not in ours, which later tests do not have
    with tempfile.TemporaryDirectory(prefix="box-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture(autouse=True)
def _nothing_is_left(own_temporary_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tempfile, "tempdir", str(own_temporary_folder))
    with adopted_orphans():
        before = left_here()
        yield
        after = left_here()
    assert after == before


def left_here() -> dict[str, object]:
    gc.collect()  # it closes what an earlier test has left
    own = tempfile.gettempdir()
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return {
        "processes": descendants(),
        "mounts": [at for at in mounts if own in at or not at.startswith(OF_OTHER_TESTS)],
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "folders": sorted(Path(tempfile.gettempdir()).glob("slipstream-code-*")),
        "code's files": LEFT.exists(),
    }


@pytest.fixture(scope="module")
def readable_copy() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="s-copy-") as folder:
        for name in COPIED:
            target = Path(folder, "slipstream", name)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target)
        shutil.copytree(Path(psutil.__file__).parent, Path(folder, "psutil"))
        for path in (Path(folder), *Path(folder).rglob("*")):
            path.chmod(0o755)
        yield Path(folder)


def python_for_nobody() -> str:
    """An interpreter that every user may start; "" if there is none."""
    for python in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        new_enough = "import sys; raise SystemExit(sys.version_info < (3, 11))"
        try:
            subprocess.run([python, "-c", new_enough], user=NOBODY, check=True, timeout=HANG_S)
        except (OSError, subprocess.SubprocessError):
            continue
        return python
    return ""


@pytest.fixture(scope="module")
def nobodys_runner(readable_copy: Path) -> Runner:
    if os.getuid() != 0:
        pytest.skip("only root can become somebody else")
    python = python_for_nobody()
    if not python:
        pytest.skip("no Python >= 3.11 that another user may start")

    def run(source: str, *, stdin: bytes = b"", limits: Limits = SMALL) -> ProgramOutcome:
        asked = {"source": source, "stdin": b64encode(stdin).decode(), "limits": asdict(limits)}
        done = subprocess.run(
            [python, "-c", SERVED],
            input=json.dumps(asked).encode(),
            capture_output=True,
            user=NOBODY,
            group=NOBODY,
            extra_groups=[],
            cwd=readable_copy,
            timeout=HANG_S,
            check=False,
        )
        if b"SandboxUnavailableError" in done.stderr:
            pytest.skip(done.stderr.decode().splitlines()[-1])
        answer = json.loads(done.stdout or done.stderr.decode())
        return ProgramOutcome(
            **(answer | {name: b64decode(answer[name]) for name in ("stdout", "stderr")})
        )

    return run


@pytest.fixture(params=["this user", "a user without rights"])
def run(request: pytest.FixtureRequest) -> Runner:
    request.getfixturevalue("_namespaces")
    if request.param == "this user":
        return lambda source, *, stdin=b"", limits=SMALL: sandbox.run(
            source, stdin=stdin, limits=limits
        )
    runner: Runner = request.getfixturevalue("nobodys_runner")
    return runner


DAEMON = f"""
import os, time
if not os.fork():
    open({str(LEFT)!r}, 'w').write('x')
    time.sleep(1000)
"""
DOUBLE_FORK = """
import os, time
if not os.fork():
    os.setsid()
    if not os.fork():
        os.closerange(0, 100)
        time.sleep(1000)
    os._exit(0)
os.wait()
print("done")
"""
BOMB = """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
"""
THREADS = """
import threading, time
for _ in range(100):
    threading.Thread(target=time.sleep, args=(1000,)).start()
"""
EATS_TOGETHER = """
import os, time
for _ in range(6):
    if not os.fork():
        held = bytearray(os.urandom(1 << 20)) * 30
        time.sleep(1000)
time.sleep(1000)
"""
FAULTS = {
    "sleeps": ("import time; time.sleep(1000)", "timeout"),
    "burns": ("while True: pass", "timeout"),
    "burns in children": ("import os\nos.fork(); os.fork()\nwhile True: pass", "timeout"),
    "ignores signals": (
        "import signal, time\nfor n in range(1, 32):\n    try: signal.signal(n, signal.SIG_IGN)\n"
        "    except OSError: pass\nwhile True: time.sleep(1)",
        "timeout",
    ),
    "daemon": (DAEMON, "ok"),
    "double fork": (DOUBLE_FORK, "ok"),
    "bomb": (BOMB, "processes"),
    "threads": (THREADS, "processes"),
    "eats memory": ("held = []\nwhile True: held.append(bytearray(1 << 20))", "memory"),
    "eats at once": ("held = bytearray(1 << 40)", "memory"),
    "eats together": (EATS_TOGETHER, "memory"),
    "prints gigabytes": ("while True: print('x' * 100_000)", "output"),
    "complains gigabytes": ("import os\nwhile True: os.write(2, b'x' * 100_000)", "output"),
    "closes everything": ("import os, time\nos.closerange(0, 1000); time.sleep(1000)", "timeout"),
    "makes files": ("import os\nfor n in range(1 << 30): os.mkdir(f'/tmp/{n}')", "memory"),
    "raises": ("raise ValueError('no')", "failed"),
    "fills the disk": ("open('f', 'wb').write(bytes(64 << 20))", "failed"),
    "dumps core": ("import os; os.abort()", "failed"),
}


@pytest.mark.parametrize(
    ("run", "name"),
    [
        *(("this user", name) for name in FAULTS),
        # What the kernel counts or ends by user, and root differs in.
        *(
            ("a user without rights", name)
            for name in ("daemon", "bomb", "threads", "eats together")
        ),
    ],
    indirect=["run"],
)
def test_a_fault_is_named_and_leaves_nothing(run: Runner, name: str):
    source, expected = FAULTS[name]

    outcome = run(source, limits=IMPATIENT if expected == "timeout" else SMALL)

    assert outcome.status == expected, outcome
    assert len(outcome.stdout) <= SMALL.max_output_bytes
    assert outcome.peak_bytes < 4 * SMALL.memory_bytes


def test_output_input_and_exit_code_are_passed_on(run: Runner):
    good = run("import sys; print(input()[::-1]); print('e', file=sys.stderr)", stdin=b"abc\n")
    assert (good.status, good.exit_code, good.text, good.stderr) == ("ok", 0, "cba\n", b"e\n")

    three = run("raise SystemExit(3)")
    assert (three.status, three.exit_code) == ("failed", 3)

    killed = run("import os; os.kill(os.getpid(), 9)")
    assert (killed.status, killed.exit_code) == ("failed", -signal.SIGKILL)


def test_memory_that_forked_children_share_is_counted_once(run: Runner):
    source = """
import os, time
held = bytearray(os.urandom(1 << 20)) * 40
read, write = os.pipe()
for _ in range(5):
    if not os.fork():
        os.close(write)
        os.read(read, 1)
        os._exit(0)
time.sleep(0.2)
os.close(write)
for _ in range(5):
    os.wait()
"""
    assert run(source).status == "ok"


def test_the_environment_is_empty(run: Runner, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("API_KEY", "hunter2")
    source = """
import os, glob
print(sorted(os.environ))
for path in glob.glob('/proc/[0-9]*/environ') + glob.glob('/proc/[0-9]*/cmdline'):
    try:
        print(open(path).read())
    except OSError:
        pass
"""
    outcome = run(source)

    assert "hunter2" not in outcome.text
    assert outcome.text.startswith("['HOME', 'LANG', 'PATH']\n")


def test_files_of_the_host_are_not_there(run: Runner):
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        for name, mode in {"private.key": 0o600, "public.key": 0o644}.items():
            Path(folder, name).write_text("hunter2")
            Path(folder, name).chmod(mode)
        source = f"""
import os
print([os.path.exists({folder!r} + name) for name in ('', '/private.key', '/public.key')])
hidden = ('/home', '/etc', '/var', '/run', '/sys', '/host', {str(ROOT)!r})
print([path for path in hidden if os.path.exists(path)])
print(sorted(os.listdir('/tmp')), sorted(os.listdir('.')), sorted(os.listdir('/dev')))
"""
        lines = run(source).text.splitlines()

    assert lines[0] == "[False, False, False]"
    assert lines[1] == "[]"
    devices = ["fd", "null", "random", "stderr", "stdin", "stdout", "urandom"]
    assert lines[2] == f"[] ['main.py'] {devices}"


def test_no_descriptor_is_inherited(run: Runner):
    held = os.open("/etc/passwd", os.O_RDONLY)
    os.set_inheritable(held, True)
    try:
        listed = (
            "import os; print([n for n in range(1000) if os.path.exists(f'/proc/self/fd/{n}')])"
        )
        assert run(listed).text == "[0, 1, 2]\n"
    finally:
        os.close(held)


@pytest.fixture
def short_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="s-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def test_no_socket_of_the_host_is_reached(run: Runner, short_folder: Path):
    addresses = [
        (socket.AF_INET, ("127.0.0.1", 0)),
        (socket.AF_UNIX, str(short_folder / "s")),
        (socket.AF_UNIX, f"\0sandbox-test-{os.getpid()}"),
    ]
    listeners = []
    for family, address in addresses:
        listener = socket.socket(family)
        listener.bind(address)
        listener.listen()
        name = listener.getsockname()
        listeners.append(
            (int(family), name.decode() if isinstance(name, bytes) else name, listener)
        )
    source = f"""
import socket
for family, address in {[(family, address) for family, address, _ in listeners]!r}:
    try:
        socket.socket(family).connect(address)
        print('connected')
    except OSError as error:
        print('refused')
"""
    try:
        assert run(source).text == "refused\n" * 3
        for family, address, _ in listeners:  # and they can be reached from here
            with socket.socket(family) as peer:
                peer.connect(address)
    finally:
        for *_, listener in listeners:
            listener.close()


ESCAPES = """
import ctypes, fcntl, mmap, os, resource, signal, socket, struct
libc = ctypes.CDLL(None, use_errno=True)
def tried(name, call):
    try:
        if (call() or 0) >= 0:
            print(name, 'done')
    except OSError:
        pass
tried('kill outside', lambda: os.kill(VICTIM, 9))
tried('write /usr', lambda: open('/usr/f', 'w').close())
tried('write /', lambda: open('/f', 'w').close())
tried('write python', lambda: open(os.__file__, 'a').close())
tried('write proc', lambda: open('/proc/sys/kernel/hostname', 'w').write('x'))
tried('mount', lambda: libc.mount(b'tmpfs', b'/tmp', b'tmpfs', 0, None))
tried('bind', lambda: libc.mount(b'/usr', b'/tmp', None, 4096, None))
tried('unmount', lambda: libc.umount2(b'/usr', 2))
tried('users', lambda: libc.unshare(0x10000000))
tried('clone users', lambda: libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0))
tried('ptrace', lambda: libc.ptrace(16, 1, 0, 0))
tried('memory of init', lambda: open('/proc/1/mem', 'rb').read(1) and 0)
tried('descriptors of init', lambda: len(os.listdir('/proc/1/fd')))
tried('root of init', lambda: len(os.listdir('/proc/1/root')))
tried('become root', lambda: os.setuid(0))
tried('memfd', lambda: os.memfd_create('x'))
tried('shared memory', lambda: libc.shmget(0, 1 << 30, 0o1666))
tried('chroot', lambda: os.chroot('/tmp'))
tried('talk to the hypervisor', lambda: socket.socket(40, socket.SOCK_STREAM).close())
tried('uncounted memory', lambda: mmap.mmap(-1, 1 << 20).close())
tried('uncounted zeros', lambda: open('/dev/zero').close())
tried('uncounted time', lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN) and 0)
tried('limits of init', lambda: resource.prlimit(1, resource.RLIMIT_NOFILE, (4, 4)) and 0)
tried('tree with attributes', lambda: libc.syscall(467, -100, b'/usr', 1, 0, 0))
tried('rewrite its own program', lambda: open('/box/main.py', 'a').close())
tried('open its program up', lambda: os.chmod('/box/main.py', 0o777))
tried('replace its program', lambda: os.replace('/box/main.py', '/box/other.py'))
tried('remove its program', lambda: os.remove('/box/main.py'))
for kind in (fcntl.F_SETLK, fcntl.F_SETLKW, 37, 38):
    with open('/box/locked', 'w') as file:
        flock = struct.pack('hhqqi4x', fcntl.F_WRLCK, 0, 7, 1, 0)
        tried('uncounted lock', lambda: fcntl.fcntl(file, kind, flock) and 0)
try:
    os.kill(1, 9)
except OSError:
    pass
print(sorted(name for name in os.listdir('/proc') if name.isdigit()))
print([line.split()[1] for line in open('/proc/self/status') if line.startswith('Cap')])
"""


def test_what_is_refused_is_nothing_that_programs_need(run: Runner):
    """Threads, pools, pipes and shells, subprocesses, event loops, files mapped and shared.

    Temporary files, a data base in memory and locks on whole files, too.
    """
    source = """
import fcntl, sqlite3, tempfile
with tempfile.NamedTemporaryFile('w+') as file:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    file.write('a'); file.seek(0)
    print(sqlite3.connect(':memory:').execute('select 1 + 1').fetchone(), file.read())
import asyncio, concurrent.futures, mmap, multiprocessing, os, socket, subprocess, threading
def double(x): return 2 * x
with concurrent.futures.ThreadPoolExecutor(2) as pool: print(list(pool.map(double, [1, 2])))
print(subprocess.run(['sh', '-c', 'echo a | cat; exit 3'], capture_output=True))
async def main():
    process = await asyncio.create_subprocess_exec('true')
    return await process.wait()
print(asyncio.run(main()))
a, b = socket.socketpair(); a.send(b'x'); print(b.recv(1))
with open('f', 'w+b') as file:
    file.write(bytes(4096)); file.flush()
    shared = mmap.mmap(file.fileno(), 4096)
    if not os.fork(): shared[0] = 7; os._exit(0)
    os.wait(); print(shared[0])
receiver, sender = multiprocessing.Pipe()
child = multiprocessing.Process(target=sender.send, args=(5,)); child.start()
print(receiver.recv()); child.join()
"""
    outcome = run(source)
    assert outcome.text.splitlines() == [
        "(2,) a",
        "[2, 4]",
        r"CompletedProcess(args=['sh', '-c', 'echo a | cat; exit 3'], returncode=3, "
        r"stdout=b'a\n', stderr=b'')",
        "0",
        "b'x'",
        "7",
        "5",
    ], outcome.stderr


def test_nothing_outside_is_touched_and_no_right_is_gained(run: Runner):
    victim = subprocess.Popen(["sleep", "1000"])
    try:
        outcome = run(ESCAPES.replace("VICTIM", str(victim.pid)))
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()

    assert outcome.text.splitlines() == ["['1', '2']", str(["0" * 16] * 5)], outcome.stderr


def test_memory_that_no_limit_counts_is_refused(run: Runner):
    source = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
class Part(ctypes.Structure):
    _fields_ = [("base", ctypes.c_char_p), ("length", ctypes.c_size_t)]
_, end = os.pipe()
print(libc.vmsplice(end, ctypes.byref(Part(b"held", 4)), 1, 0), ctypes.get_errno())
print(libc.inotify_init(), libc.inotify_init1(0), libc.inotify_add_watch(0, b"/box", 1))
print(libc.fanotify_init(0, 0), ctypes.get_errno())
"""
    assert run(source).text == "-1 1\n-1 -1 -1\n-1 1\n"


def test_programs_run_from_tmp_too(run: Runner):
    """As docs/adr/0034 states: Python runs any machine code without a file."""
    source = """
import os, subprocess
with open("/tmp/program", "w") as file:
    file.write("#!/bin/sh\\necho it runs\\n")
os.chmod("/tmp/program", 0o700)
print(subprocess.run(["/tmp/program"], capture_output=True, text=True).stdout, end="")
"""
    assert run(source).text == "it runs\n"


def test_code_that_ends_process_1_has_failed_and_the_sandbox_is_not_missing(run: Runner):
    source = """
import resource
try:
    resource.prlimit(1, resource.RLIMIT_CPU, (0, 0))
except OSError:
    raise SystemExit(1)
while True:
    pass
"""
    assert run(source, limits=IMPATIENT).status in ("failed", "timeout")


@needs_namespaces
def test_a_killed_owner_takes_the_code_with_it():
    script = (
        "from slipstream.broker.sandbox import sandbox; sandbox.run('import time; time.sleep(99)')"
    )
    before = descendants()
    owner = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT)
    until(lambda: len(psutil.Process(owner.pid).children(recursive=True)) >= 3)
    owner.kill()
    owner.wait()

    until_none_but(before)


def until_none_but(before: set[int]) -> None:
    """Wait until there are no more processes below us than before."""

    def are_gone() -> bool:
        left = [p for p in psutil.Process().children(recursive=True) if p.pid not in before]
        for one in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                if one.ppid() == os.getpid() and one.status() == psutil.STATUS_ZOMBIE:
                    os.waitpid(one.pid, 0)
        return not left

    until(are_gone, lambda: str(psutil.Process().children(recursive=True)))


# Not these: they are what namespaces are needed for.
@pytest.mark.parametrize("name", sorted(set(FAULTS) - {"bomb", "burns in children", "makes files"}))
def test_without_namespaces_faults_are_named_and_nothing_is_left(name: str):
    source, expected = FAULTS[name]
    try:
        limits = IMPATIENT if expected == "timeout" else SMALL
        assert sandbox.run(source, limits=limits, mode="none").status == expected
    finally:
        LEFT.unlink(missing_ok=True)


@pytest.mark.parametrize("mode", ["none", "namespaces"])
@pytest.mark.parametrize(
    ("init", "start_s", "why"),
    [
        ("import time; time.sleep(1000)", 0.1, r"did not start within 0\.3 s"),
        ("import os\nwhile True: os.write(2, b'x' * 4096)", HANG_S, "xxx"),
    ],
    ids=["hangs", "prints"],
)
def test_a_sandbox_that_does_not_start_is_missing_and_no_fault_of_the_code(
    mode: sandbox.Mode, init: str, start_s: float, why: str, tmp_path: Path
):
    program = tmp_path / "init.py"
    program.write_text(init)
    limits = Limits(own_s=0.2, max_output_bytes=10_000, start_s=start_s)
    with pytest.raises(SandboxUnavailableError, match=why):
        sandbox.run("print(1)", limits=limits, mode=mode, init=program)


BURNS = """
import time
while time.process_time() < 0.6:
    pass
print("done")
"""


@contextmanager
def busy_machine() -> Iterator[None]:
    """Have five others on every core that never leave it."""
    spin = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(spin) for _ in range(5 * len(os.sched_getaffinity(0)))]
    try:
        yield
    finally:
        for one in others:
            one.kill()
        for one in others:
            one.wait()


@needs_namespaces
@pytest.mark.parametrize("mode", ["namespaces", "none"])
def test_a_busy_machine_makes_no_run_too_slow(mode: sandbox.Mode):
    """With a sixth of a core 0.6 seconds of work take more than the 1.5 that it may take."""
    with busy_machine():
        outcome = sandbox.run(BURNS, limits=replace(SMALL, own_s=1.5, cpu_s=1.5), mode=mode)
    assert (outcome.status, outcome.stdout) == ("ok", b"done\n")
    assert 0.3 < outcome.own_s < 1.5


@needs_namespaces
@pytest.mark.parametrize("mode", ["namespaces", "none"])
@pytest.mark.parametrize("source", ["import time; time.sleep(1000)", "while True: pass"])
def test_what_hangs_ends_on_a_busy_machine_all_the_same(mode: sandbox.Mode, source: str):
    with busy_machine():
        limits = replace(SMALL, own_s=0.5, cpu_s=0.5, at_most=600.0)  # other tests run, too
        outcome = sandbox.run(source, limits=limits, mode=mode)
    assert outcome.status == "timeout"


@needs_namespaces
@pytest.mark.parametrize("mode", ["namespaces", "none"])
@pytest.mark.parametrize("vfork", ["syscall(58)", "vfork()"])
def test_process_that_hangs_as_if_it_waited_for_a_disk_is_ended(mode: sandbox.Mode, vfork: str):
    """A parent in vfork waits until the child starts its program, as if it read a disk."""
    if os.uname().machine != "x86_64" and vfork != "vfork()":
        pytest.skip("there is no such call here")
    source = f"import ctypes, time\nctypes.CDLL(None).{vfork}\ntime.sleep(1000)"
    outcome = sandbox.run(source, limits=replace(SMALL, own_s=0.5), mode=mode)
    assert outcome.status == "timeout"


@needs_namespaces
def test_a_run_that_gets_nothing_of_the_machine_is_no_fault_of_the_code():
    starved = replace(SMALL, own_s=2.0, at_most=0.2)
    with pytest.raises(SandboxUnavailableError, match="the machine is too busy: in"):
        sandbox.run("import time; time.sleep(1000)", limits=starved)


@needs_namespaces
def test_a_preflight_passes_where_the_sandbox_works():
    sandbox.check("namespaces")
    sandbox.check("none")


@needs_namespaces
def test_runs_at_the_same_time_do_not_count_each_other():
    source = "import os, time\nfor _ in range(8):\n    os.fork() or (time.sleep(0.5), os._exit(0))"
    with ThreadPoolExecutor(4) as pool:
        outcomes = list(pool.map(lambda _: sandbox.run(source, limits=SMALL), range(4)))

    assert [outcome.status for outcome in outcomes] == ["ok"] * 4


def printed_in_a_machine(flags: list[str], command: str, script: str) -> str:
    """Return what a script prints where a shell's ``command`` starts it, in other namespaces."""
    try:
        done = subprocess.run(
            ["unshare", *flags, "sh", "-c", command, sys.executable, script],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
        )
    except FileNotFoundError:
        pytest.skip("no unshare from util-linux to make such a machine with")
    if not done.stdout:
        pytest.skip(f"such a machine cannot be made here: {done.stderr.strip()[-200:]}")
    return done.stdout


def test_machine_without_namespaces_is_reported_with_setting_and_reason():
    script = """
from slipstream.broker.sandbox import jail, sandbox
from slipstream.broker.sandbox.bubblewrap import SandboxUnavailableError
print(sandbox.run("print(1)", mode="none").text)
for start in (lambda: sandbox.check("namespaces"), jail.check_jail):
    try:
        start()
    except SandboxUnavailableError as error:
        print(error)
"""
    refusing = (
        "echo 0 > /proc/sys/user/max_user_namespaces && "
        'exec setpriv --bounding-set=-sys_admin "$0" -c "$1"'
    )
    printed = printed_in_a_machine(["-Ur"], refusing, script)

    one, empty, *refusals = printed.splitlines()
    assert (one, empty, len(refusals)) == ("1", "", 2)
    for refusal in refusals:
        assert 'reward.sandbox = "namespaces" cannot start bubblewrap' in refusal
        assert "namespace" in refusal.partition("bubblewrap:")[2]
        assert "user.max_user_namespaces = 0" in refusal
        assert 'reward.sandbox = "none"' in refusal


# ---- trusted commands in a PID namespace ---------------------------------------


@needs_namespaces
def test_a_jailed_command_keeps_descriptors_environment_and_exit_code(tmp_path: Path):
    read, write = os.pipe()
    script = (
        f"import os; os.write({write}, os.environ['WORD'].encode()); "
        "print(os.getcwd()); raise SystemExit(7)"
    )
    command = jailed([sys.executable, "-c", script])
    done = subprocess.run(
        command,
        pass_fds=[write],
        env={"WORD": "kept"},
        cwd=tmp_path,
        capture_output=True,
        check=False,
    )
    os.close(write)

    assert (done.returncode, done.stdout) == (7, f"{tmp_path}\n".encode())
    assert os.read(read, 100) == b"kept"
    assert os.read(read, 100) == b""  # no other process holds it
    os.close(read)


@needs_namespaces
def test_a_jailed_command_reads_the_bytecode_of_roles_and_writes_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path))
    (tmp_path / "role.pyc").write_text("compiled")
    script = f"""
from pathlib import Path
folder = Path({str(tmp_path)!r})
print((folder / "role.pyc").read_text())
for change in ((folder / "new.pyc").touch, (folder / "role.pyc").unlink):
    try:
        change()
    except OSError as error:
        print(error.strerror)
"""
    command = jailed([sys.executable, "-B", "-c", script])
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["compiled", *["Read-only file system"] * 2], done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["role.pyc"]


@needs_namespaces
def test_a_jailed_command_that_closes_a_descriptor_is_seen_to():
    read, write = os.pipe()
    script = f"import os, time; os.close({write}); time.sleep(1000)"
    before = descendants()
    process = subprocess.Popen(jailed([sys.executable, "-c", script]), pass_fds=[write])
    os.close(write)
    assert os.read(read, 1) == b""
    assert process.poll() is None
    os.close(read)
    process.kill()
    process.wait()

    until_none_but(before)


@needs_namespaces
def test_hidden_files_and_folders_are_empty_for_a_jailed_command(tmp_path: Path):
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "a.key").write_text("hunter2")
    (tmp_path / "b.key").write_text("hunter2")
    (tmp_path / "seen").write_text("seen")
    script = "import os; print(os.listdir('keys'), repr(open('b.key').read()), open('seen').read())"
    hide = [tmp_path / "keys", tmp_path / "b.key", tmp_path / "absent"]
    done = subprocess.run(
        jailed([sys.executable, "-c", script], hide=hide),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.stdout == "[] '' seen\n", done.stderr
    assert (tmp_path / "b.key").read_text() == "hunter2"


@needs_namespaces
@pytest.mark.parametrize("victim", ["bubblewrap", "init"])
def test_killing_the_jail_kills_daemons_below_it(victim: str):
    script = DOUBLE_FORK + "\ntime.sleep(1000)"
    before = descendants()
    process = subprocess.Popen(
        jailed([sys.executable, "-c", script]), stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"done\n"
    init = psutil.Process(process.pid).children()[0]
    (process if victim == "bubblewrap" else init).kill()
    process.wait()
    process.stdout.close()

    until_none_but(before)


@needs_namespaces
def test_a_jail_whose_init_is_killed_ends_when_all_below_it_is_gone():
    script = DOUBLE_FORK + "\ntime.sleep(1000)"
    process = subprocess.Popen(jailed([sys.executable, "-c", script]), stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"done\n"
    below = psutil.Process(process.pid).children(recursive=True)
    psutil.Process(process.pid).children()[0].kill()
    process.wait()
    process.stdout.close()

    assert len(below) == 3
    assert not any(child.is_running() for child in below)


def test_a_jail_starts_where_parts_of_proc_are_masked():
    """As in a container: no /proc of its own may be mounted, and a user namespace is needed."""
    script = """
import os, subprocess, sys
from slipstream.broker.sandbox.jail import jailed
pid = [sys.executable, '-c', 'import os; print(os.getppid(), os.path.exists("/proc/1"))']
subprocess.run(jailed(pid))
"""
    masked = 'mount -t tmpfs none /proc/irq && exec setpriv --bounding-set=-sys_admin "$0" -c "$1"'
    printed = printed_in_a_machine(["-mpf", "--mount-proc"], masked, script)
    assert printed == "1 True\n"


@needs_namespaces
def test_a_sandbox_starts_inside_a_jail():
    script = "from slipstream.broker.sandbox import sandbox; print(sandbox.run('print(1)').text)"
    done = subprocess.run(
        jailed([sys.executable, "-c", script]),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.stdout == "1\n\n", done.stderr
