"""Runs a command in Linux namespaces of its own, so that killing one process ends all of it.

A script for ``python -I -S jail.py SPECIFICATION [COMMAND...]``: the standard library only, and
none of our modules, because it runs before (and as) somebody else's code. ``sandbox.py`` writes
the specification. Three processes stand in a row, each dying with the one above it:

    outer    enters the namespaces, waits
    init     process 1 of the new PID namespace: builds the file system, reaps orphans
    command  what was asked for; when it ends, init ends, and the kernel kills whatever is left

Profiles: ``pid`` (trusted code: the same files, network, environment and descriptors, but some
paths are covered), ``sandbox`` (code that nobody trusts: its own root, no network, no privileges,
limits) and ``plain`` (no namespaces at all: limits, and a parent that kills what it can find).
"""

from __future__ import annotations

import binascii
import ctypes
import errno
import json
import os
import resource
import select
import signal
import sys
import time

TYPE_CHECKING = False  # importing typing takes a tenth of our time
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn, TypeAlias

    Spec: TypeAlias = dict[str, Any]

NEW_MOUNTS, NEW_UTS, NEW_IPC = 0x00020000, 0x04000000, 0x08000000
NEW_USERS, NEW_PIDS, NEW_NETWORK, NEW_CGROUP = 0x10000000, 0x20000000, 0x40000000, 0x02000000
_READ_ONLY, _NO_SUID, _NO_DEV, _NO_EXEC, _REMOUNT = 1, 2, 4, 8, 32
_BIND, _RECURSIVE, _PRIVATE, _DETACH = 4096, 16384, 1 << 18, 2
_SET_DEATH_SIGNAL, _SET_DUMPABLE, _DROP_BOUNDING, _SET_SECCOMP, _SET_SUBREAPER = 1, 4, 24, 22, 36
_NO_NEW_PRIVILEGES, _AMBIENT, _AMBIENT_CLEAR_ALL = 38, 47, 4
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE = 442, -100, 0x8000

INSIDE_UID = 1000  # who the code is in a user namespace
FIRST_SPARE_UID = 1_879_048_192  # plus the PID: started by root, each run is another user
NOBODY = 65534
SETUP_FAILED = 125

libc = ctypes.CDLL(None, use_errno=True)


class SetupError(Exception):
    """A step of the setup that the kernel refused."""


def call(name: str, *arguments: object) -> int:
    """Call a function of libc; raise SetupError with its name and the kernel's answer."""
    result = int(getattr(libc, name)(*arguments))
    if result < 0:
        code = ctypes.get_errno()
        shown = " ".join(str(item) for item in arguments if isinstance(item, bytes))
        raise SetupError(
            f"{name}({shown}): {os.strerror(code)} ({errno.errorcode.get(code, code)})"
        )
    return result


def long(value: int) -> ctypes.c_ulong:
    """Return an argument for prctl, which reads all of a register."""
    return ctypes.c_ulong(value)


def die_with_parent() -> None:
    """Be killed when the parent ends. Forgotten by the kernel when the user changes: call after."""
    call("prctl", _SET_DEATH_SIGNAL, long(signal.SIGKILL), long(0), long(0), long(0))


# ---- the three processes -------------------------------------------------------


def enter(flags: int, inside_uid: int | None) -> bool:
    """Enter new namespaces, with a user namespace where that is needed; return if it was.

    Args:
        flags: the namespaces.
        inside_uid: who we are in the user namespace; None keeps our ids.
    """
    if libc.unshare(flags) == 0:
        return False
    uid, gid = os.getuid(), os.getgid()
    call("unshare", flags | NEW_USERS)
    maps = {
        "setgroups": "deny",
        "uid_map": f"{uid if inside_uid is None else inside_uid} {uid} 1",
        "gid_map": f"{gid if inside_uid is None else inside_uid} {gid} 1",
    }
    for name, content in maps.items():
        try:
            with open(f"/proc/self/{name}", "w") as file:  # noqa: PTH123 pathlib is slow to import
                file.write(content)
        except OSError as error:
            raise SetupError(f"/proc/self/{name}: {error.strerror}") from error
    return True


def outer(spec: Spec, command: list[str]) -> NoReturn:
    """Enter the namespaces, start init, and end as the command ends."""
    parent = os.getppid()
    sandboxed = spec["profile"] == "sandbox"
    flags = NEW_PIDS | NEW_MOUNTS
    if sandboxed:
        flags |= NEW_NETWORK | NEW_IPC | NEW_UTS | NEW_CGROUP
    own_users = enter(flags, INSIDE_UID if sandboxed else None)
    die_with_parent()
    if os.getppid() != parent or spec.get("parent", parent) != parent:
        sys.exit(SETUP_FAILED)  # it ended before we were bound to it
    spec["uid"] = 0 if own_users or os.getuid() else FIRST_SPARE_UID + os.getpid()
    nothing = os.open("/dev/null", os.O_RDWR)
    lifeline, held = os.pipe()
    child = os.fork()
    if not child:
        os.close(held)
        guarded(spec, lambda: init(spec, command, lifeline, nothing))
    let_go(nothing, keep=held)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGKILL))
    _, status = os.waitpid(child, 0)
    os._exit(as_exit_code(status))


def init(spec: Spec, command: list[str], lifeline: int, nothing: int) -> NoReturn:
    """Be process 1: build the file system, start the command, reap until it ends."""
    die_with_parent()
    if select.select([lifeline], [], [], 0)[0]:
        os._exit(SETUP_FAILED)  # outer ended before we were bound to it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    call("prctl", _SET_DUMPABLE, long(0), long(0), long(0), long(0))
    call("mount", None, b"/", None, long(_RECURSIVE | _PRIVATE), None)
    if spec["profile"] == "sandbox":
        build_root(spec)
    else:
        cover(spec["hide"])
        mount_proc(b"/proc")
    main = os.fork()
    if not main:
        guarded(spec, lambda: become(spec, command))
    let_go(nothing, keep=spec.get("report", -1))
    while True:
        pid, status = os.wait()
        if pid == main:
            report_end(spec, status)
            os._exit(as_exit_code(status))


def become(spec: Spec, command: list[str]) -> NoReturn:
    """Turn into the command."""
    die_with_parent()
    for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    if spec["profile"] == "sandbox":
        os.setsid()
        os.chdir("/box")
        lose_privileges(spec["uid"])
        set_limits(spec["limits"])
        refuse_system_calls()
        execute(spec, command)
    os.execvp(command[0], command)  # noqa: S606 that is what this script is for


def execute(spec: Spec, command: list[str]) -> NoReturn:
    """Turn into code that nobody trusts: no descriptors, no environment of ours."""
    close_all(keep=spec["report"])
    os.set_inheritable(spec["report"], False)
    report(spec, {"started": True})
    os.execve(command[0], command, spec["environment"])  # noqa: S606


def guarded(spec: Spec, body: Callable[[], object]) -> NoReturn:
    """Run a forked child's body; what the kernel refused is reported, and nothing returns."""
    try:
        body()
    except (SetupError, OSError) as error:
        complain(spec, str(error))
    finally:
        os._exit(SETUP_FAILED)


def complain(spec: Spec, reason: str) -> None:
    """Say why the command did not start."""
    if "report" in spec:
        report(spec, {"error": reason})
    else:
        os.write(2, f"namespaces: {reason}\n".encode())


def report(spec: Spec, message: dict[str, object]) -> None:
    """Send a line to whoever started us; the descriptor closes when the command starts."""
    if "report" in spec:
        try:
            os.write(spec["report"], json.dumps(message).encode() + b"\n")
        except OSError:
            os._exit(SETUP_FAILED)


def report_end(spec: Spec, status: int) -> None:
    """Say how the command ended, and what it and those of its children that we reaped took."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    report(
        spec,
        {
            "exit": os.waitstatus_to_exitcode(status),
            "cpu_s": used.ru_utime + used.ru_stime,
            "peak_bytes": used.ru_maxrss * 1024,
        },
    )


def as_exit_code(status: int) -> int:
    """Return what a shell would: 128 + the signal where there was one."""
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code


def let_go(nothing: int, keep: int) -> None:
    """Close every descriptor but one, so that the other ends see the command close theirs.

    Args:
        nothing: /dev/null, opened before the root changed for all in our namespace.
        keep: what stays open.
    """
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    close_all(keep)


def close_all(keep: int) -> None:
    """Close all descriptors from 3 on, but one."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    most = most if 0 < most < 1 << 31 else 1 << 20
    if keep < 3:
        os.closerange(3, most)
        return
    os.closerange(3, keep)
    os.closerange(keep + 1, most)


# ---- without namespaces --------------------------------------------------------


def plain(spec: Spec, command: list[str]) -> NoReturn:
    """Run the command as our child, then kill all that came from it; SIGTERM asks for that."""
    parent = os.getppid()
    die_with_parent()
    if spec["parent"] != parent:
        sys.exit(SETUP_FAILED)
    call("prctl", _SET_SUBREAPER, long(1), long(0), long(0), long(0))  # daemons come back to us
    signal.signal(signal.SIGTERM, lambda *_: finish(SETUP_FAILED))
    nothing = os.open("/dev/null", os.O_RDWR)
    main = os.fork()
    if not main:
        guarded(spec, lambda: become_plain(spec, command))
    let_go(nothing, keep=spec["report"])
    while True:
        pid, status = os.wait()
        if pid == main:
            report_end(spec, status)
            finish(as_exit_code(status))


def become_plain(spec: Spec, command: list[str]) -> NoReturn:
    """Turn into the command, with limits and nothing else."""
    die_with_parent()
    for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    os.setsid()
    set_limits(spec["limits"])
    execute(spec, command)


def finish(exit_code: int) -> NoReturn:
    """Kill all that is below us, for two seconds at most, and end."""
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:
        for pid in below(os.getpid()):
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            break
        time.sleep(0.001)
    os._exit(exit_code)


def below(root: int) -> list[int]:
    """Return the processes below one, by their parents."""
    parents = {}
    for name in os.listdir("/proc"):  # noqa: PTH208
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123
                    parents[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
            except OSError:
                continue
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found[1:]


# ---- file systems --------------------------------------------------------------


def cover(paths: list[str]) -> None:
    """Lay something empty over files and folders."""
    for path in paths:
        real = os.path.realpath(path).encode()
        if os.path.isdir(real):  # noqa: PTH112 pathlib is slow to import
            flags = long(_READ_ONLY | _NO_SUID | _NO_DEV | _NO_EXEC)
            call("mount", b"tmpfs", real, b"tmpfs", flags, b"size=4k,mode=755")
        elif os.path.lexists(real):
            call("mount", b"/dev/null", real, None, long(_BIND), None)


def mount_proc(target: bytes) -> None:
    """Show the processes of this namespace; without a /proc of our own, go on without."""
    flags = long(_NO_SUID | _NO_DEV | _NO_EXEC)
    if libc.mount(b"proc", target, b"proc", flags, None) and target != b"/proc":
        raise SetupError(f"mount(proc): {os.strerror(ctypes.get_errno())}")


def build_root(spec: Spec) -> None:
    """Make a root of nothing but system libraries and Python, and go there for good."""
    call("sethostname", b"sandbox", 7)
    call("mount", b"tmpfs", b"/tmp", b"tmpfs", long(_NO_SUID), b"size=1m,mode=755")
    os.mkdir("/tmp/host", 0o700)  # noqa: PTH102, S108 our own tmpfs
    call("pivot_root", b"/tmp", b"/tmp/host")
    os.chdir("/")
    for path in spec["visible"]:
        show(path)
    os.mkdir("/dev", 0o755)  # noqa: PTH102
    for name in ("null", "random", "urandom"):  # a mapping of zero is memory that nobody counts
        os.close(os.open(f"/dev/{name}", os.O_CREAT | os.O_WRONLY, 0o644))
        bind(f"/host/dev/{name}", f"/dev/{name}")
    for name, target in {"fd": "", "stdin": "/0", "stdout": "/1", "stderr": "/2"}.items():
        os.symlink(f"/proc/self/fd{target}", f"/dev/{name}")  # noqa: PTH211
    os.mkdir("/proc", 0o755)  # noqa: PTH102
    mount_proc(b"/proc")
    options = f"size={spec['disk_bytes']},nr_inodes=4096,mode=1777".encode()
    for folder in ("/tmp", "/box"):  # noqa: S108 the one in there
        os.mkdir(folder)  # noqa: PTH102
        flags = long(_NO_SUID | _NO_DEV | _NO_EXEC)
        call("mount", b"tmpfs", folder.encode(), b"tmpfs", flags, options)
    write_files(spec["files"])
    call("umount2", b"/host", _DETACH)
    os.rmdir("/host")  # noqa: PTH106
    call("mount", None, b"/", None, long(_REMOUNT | _BIND | _READ_ONLY | _NO_SUID), None)


def show(path: str) -> None:
    """Make a path of the host visible, read-only; a link stays a link."""
    host = "/host" + path
    if os.path.islink(host):  # noqa: PTH114
        os.symlink(os.readlink(host), path)  # noqa: PTH115, PTH211
    elif os.path.isdir(host):  # noqa: PTH112
        os.makedirs(path, 0o755, exist_ok=True)  # noqa: PTH103
        bind(host, path)
        make_read_only(path.encode())


def bind(source: str, target: str) -> None:
    """Mount what is at one path at another one too."""
    flags = long(_BIND | _RECURSIVE)
    call("mount", source.encode(), target.encode(), None, flags, None)


def make_read_only(path: bytes) -> None:
    """Make a mount, and those below it, read-only and of no use to set-uid programs."""
    wanted = (ctypes.c_uint64 * 4)(_READ_ONLY | _NO_SUID | _NO_DEV, 0, 0, 0)
    attributes = [_MOUNT_SETATTR, _AT_FDCWD, path, _AT_RECURSIVE, wanted, ctypes.sizeof(wanted)]
    if libc.syscall(*attributes) == 0:
        return
    kept = os.statvfs(path).f_flag & (_NO_EXEC | 1024 | 2048 | 4096)  # and the times of access
    flags = {1024: 1024, 2048: 2048, 4096: 1 << 21, _NO_EXEC: _NO_EXEC}
    locked = sum(flag for bit, flag in flags.items() if kept & bit)
    every = _REMOUNT | _BIND | _READ_ONLY | _NO_SUID | _NO_DEV | locked
    call("mount", None, path, None, long(every), None)


def write_files(files: dict[str, str]) -> None:
    """Write the code and its files, given in base64 by relative path, into its work folder."""
    for name, content in files.items():
        path = os.path.join("/box", name)  # noqa: PTH118
        os.makedirs(os.path.dirname(path), exist_ok=True)  # noqa: PTH103, PTH120
        with open(path, "wb") as file:  # noqa: PTH123
            file.write(binascii.a2b_base64(content))
    for top in {name.split("/")[0] for name in files}:  # the code may be the user who wrote them
        path = f"/box/{top}"
        bind(path, path)
        make_read_only(path.encode())


# ---- privileges and limits -----------------------------------------------------


def lose_privileges(uid: int) -> None:
    """Give up every capability for good and, started by root, root itself."""
    for capability in range(64):
        if libc.prctl(_DROP_BOUNDING, long(capability), long(0), long(0), long(0)) < 0:
            break
    libc.prctl(_AMBIENT, long(_AMBIENT_CLEAR_ALL), long(0), long(0), long(0))
    if uid:
        os.setgroups([])
        try:
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        except OSError:  # a container with few users
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    call("capset", header, (ctypes.c_uint32 * 6)())
    call("prctl", _NO_NEW_PRIVILEGES, long(1), long(0), long(0), long(0))
    die_with_parent()


def set_limits(limits: dict[str, int]) -> None:
    """Set limits by their names in ``resource``, never above ours; programs may ask for stack."""
    for name, wanted in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        most = resource.getrlimit(kind)[1]
        value = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
        resource.setrlimit(kind, (value, most if name == "STACK" else value))


# What leaves traces or memory outside of the limits, or reaches for more rights than there are:
# memfd_create, memfd_secret, shmget, shmat, msgget, semget, mq_open; ptrace, process_vm_readv,
# process_vm_writev, bpf, perf_event_open, userfaultfd; mount, umount2, pivot_root, chroot, unshare,
# setns, open_by_handle_at; add_key, request_key, keyctl, io_uring_setup.
_REFUSED = {
    "x86_64": (
        *(319, 447, 29, 30, 68, 64, 240),  # memfd_create to mq_open
        *(101, 310, 311, 321, 298, 323),  # ptrace to userfaultfd
        *(165, 166, 155, 161, 272, 308, 304),  # mount to open_by_handle_at
        *(248, 249, 250, 425),  # add_key to io_uring_setup
    ),
    "aarch64": (
        *(279, 447, 194, 196, 186, 190, 180),
        *(117, 270, 271, 280, 241, 282),
        *(40, 39, 41, 51, 97, 268, 265),
        *(217, 218, 219, 425),
    ),
}
# open_tree to fspick, mount_setattr, open_tree_attr, on both.
_NEW_MOUNT_CALLS = (428, 429, 430, 431, 432, 433, 442, 467)
_ARCHITECTURE = {"x86_64": (0xC000003E, 56), "aarch64": (0xC00000B7, 220)}  # and clone
_CLONE3 = 435
# Looked at by their arguments: socket, socketpair; mmap; rt_sigaction; prlimit64; setsockopt and
# fcntl.
_BY_ARGUMENT = {
    "x86_64": ((41, 53), 9, 13, 302, 54, 72),
    "aarch64": ((198, 199), 222, 134, 261, 208, 25),
}
_RANGE_LOCKS = (6, 7, 37, 38)  # F_SETLK, F_SETLKW, F_OFD_SETLK, F_OFD_SETLKW
_BUFFER_SIZES = (7, 8, 32, 33)  # SO_SNDBUF, SO_RCVBUF, and both by force
_FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6: what a network namespace keeps apart
_SHARED_ANONYMOUS = 0x21  # MAP_SHARED | MAP_ANONYMOUS
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_KEEP_BITS = 0x54
_NUMBER, _CPU = 0, 4  # offsets in what a filter looks at; then the arguments, low half first
_ARGUMENTS = 16
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000


class _Instruction(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_uint16),
        ("if_true", ctypes.c_uint8),
        ("if_false", ctypes.c_uint8),
        ("value", ctypes.c_uint32),
    )


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("start", ctypes.POINTER(_Instruction)))


def system_call_filter(machine: str) -> list[tuple[int, int, int, int]]:
    """Return a BPF program that refuses some system calls.

    Raises:
        SetupError: we do not know this CPU's calls.
    """
    if machine not in _ARCHITECTURE:
        raise SetupError(f"no system calls are known of the CPU {machine}")
    audit, clone = _ARCHITECTURE[machine]
    namespaces = NEW_MOUNTS | NEW_UTS | NEW_IPC | NEW_USERS | NEW_PIDS | NEW_NETWORK | NEW_CGROUP
    refuse = (_RETURN, 0, 0, _REFUSE | errno.EPERM)
    program = [(_LOAD, 0, 0, _CPU), (_EQUAL, 1, 0, audit), (_RETURN, 0, 0, _KILL)]
    program += [(_LOAD, 0, 0, _NUMBER)]
    if machine == "x86_64":
        program += [(_AT_LEAST, 0, 1, 0x40000000), refuse]  # the x32 numbers
    for number in (*_REFUSED[machine], *_NEW_MOUNT_CALLS):
        program += [(_EQUAL, 0, 1, number), refuse]
    # clone3 keeps its flags in memory, where a filter cannot look: libc falls back to clone.
    program += [(_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _REFUSE | errno.ENOSYS)]
    allow = (_RETURN, 0, 0, _ALLOW)
    program += _by_argument(clone, 0, [(_ANY_BIT, 0, 1, namespaces), refuse])
    sockets, mmap, sigaction, prlimit, setsockopt, fcntl = _BY_ARGUMENT[machine]
    families = [line for family in _FAMILIES for line in ((_EQUAL, 0, 1, family), allow)]
    for number in sockets:
        program += _by_argument(number, 0, [*families, refuse])
    # Pages of such memory stay when no process has them in its table: nobody counts them.
    shared = [(_KEEP_BITS, 0, 0, _SHARED_ANONYMOUS), (_EQUAL, 0, 1, _SHARED_ANONYMOUS), refuse]
    program += _by_argument(mmap, 3, shared)
    # Who ignores the end of its children hides what they used. To look (no new action) is allowed.
    new_action = [(_LOAD, 0, 0, _ARGUMENTS + 8), (_EQUAL, 1, 0, 0), refuse]
    new_action += [(_LOAD, 0, 0, _ARGUMENTS + 12), (_EQUAL, 1, 0, 0), refuse]
    of_child = [(_EQUAL, 0, len(new_action), signal.SIGCHLD), *new_action]
    program += _by_argument(sigaction, 0, of_child)
    program += _by_argument(prlimit, 0, [(_EQUAL, 1, 0, 0), refuse])  # one's own limits
    # What waits in a socket is the kernel's memory, which nobody counts: no more than is usual.
    sizes = [line for option in _BUFFER_SIZES for line in ((_EQUAL, 0, 1, option), refuse)]
    program += _by_argument(setsockopt, 2, sizes)
    # A file may have any number of locks on ranges of it, each some of the kernel's memory, and no
    # limit counts them. Locks on whole files (flock) are as few as descriptors.
    no_locks = (_RETURN, 0, 0, _REFUSE | errno.ENOLCK)
    locks = [line for kind in _RANGE_LOCKS for line in ((_EQUAL, 0, 1, kind), no_locks)]
    program += _by_argument(fcntl, 1, locks)
    return [*program, allow]


def _by_argument(
    number: int, argument: int, lines: list[tuple[int, int, int, int]]
) -> list[tuple[int, int, int, int]]:
    """Return lines that look at the low half of one argument of a call; past them it is allowed."""
    load = (_LOAD, 0, 0, _ARGUMENTS + 8 * argument)
    inner = [load, *lines, (_RETURN, 0, 0, _ALLOW)]
    return [(_EQUAL, 0, len(inner), number), *inner]


def refuse_system_calls() -> None:
    """Install the filter."""
    program = system_call_filter(os.uname().machine)
    instructions = (_Instruction * len(program))(*[_Instruction(*line) for line in program])
    wrapped = _Program(len(program), instructions)
    call("prctl", _SET_SECCOMP, long(2), ctypes.byref(wrapped), long(0), long(0))


# ---- start ---------------------------------------------------------------------


def main(arguments: list[str]) -> NoReturn:
    """Read the specification, from the argument or the descriptor that it names, and go in."""
    spec: Spec = json.loads(arguments[0])
    if "read" in spec:
        with open(spec["read"], "rb") as file:  # noqa: PTH123
            spec |= json.load(file)
    try:
        (plain if spec["profile"] == "plain" else outer)(spec, arguments[1:])
    except (SetupError, OSError) as error:
        complain(spec, str(error))
    sys.exit(SETUP_FAILED)


if __name__ == "__main__":
    main(sys.argv[1:])
