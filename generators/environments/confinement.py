"""Keeps the process of a trajectory from its loader and from its neighbours, by the kernel.

Each has a PID namespace, mounts and IPC objects of its own, and a filter of system calls. Each has
a user id of its own if the loader may choose user ids, else a user namespace of its own. Of root's
rights it may keep the right to read files (docs/adr/0059).
"""

import ctypes
import errno
import functools
import os
import secrets
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from slipstream.broker.sandbox.system_calls import compiled, trajectory_filter
from slipstream.wire.errors import ConfigError
from slipstream.wire.process.processes import die_with_parent

_NEW_MOUNTS, _NEW_IPC, _NEW_USER, _NEW_PID = 0x00020000, 0x08000000, 0x10000000, 0x20000000
_PRIVATE_BELOW = (1 << 18) | (1 << 14)  # MS_PRIVATE, MS_REC
_READ_ONLY = 1
_NO_PROGRAMS = 2 | 4 | 8  # MS_NOSUID, MS_NODEV, MS_NOEXEC
_SET_DUMPABLE, _KEEP_CAPABILITIES, _SET_SECCOMP, _DROP_BOUNDING = 4, 8, 22, 24
_NO_NEW_PRIVILEGES, _AMBIENT, _RAISE, _FILTER = 38, 47, 2, 2
_CAPABILITIES_V3 = 0x20080522
_READ_FILES = 2  # CAP_DAC_READ_SEARCH
_NAMESPACES = 1 << 21  # CAP_SYS_ADMIN
_CHOOSE_IDS = (1 << 7) | (1 << 6)  # CAP_SETUID, SETGID
_SPARE_IDS = range(1_883_242_496, 1_883_242_496 + (1 << 22))
_FEWEST_IDS = 1 << 12
_LINE_BYTES = 4096
_ENTERED = "entered"

_libc = ctypes.CDLL(None, use_errno=True)
_libc.prctl.argtypes = (ctypes.c_int, *[ctypes.c_ulong] * 4)


def keep_memory_private() -> None:
    """Keep other processes of this user, unless it is root, from reading this one's memory."""
    _prctl(_SET_DUMPABLE, 0)


class Confinement:
    """Means that keep the trajectories of one loader apart; chosen before the first."""

    def __init__(self, user_ids: range, *, has_namespaces: bool, reads_all: bool) -> None:
        """Take the means.

        Args:
            user_ids: User ids of trajectories; without any they keep ours, in user namespaces of
                their own if they have namespaces.
            has_namespaces: True if each has a PID namespace, with its own mounts and IPC objects.
            reads_all: True if we may read all files: the one capability that they may keep.
        """
        self._user_ids = user_ids
        self.has_namespaces = has_namespaces
        self._kept = int(reads_all) << _READ_FILES
        self.continues_in_child = has_namespaces and not user_ids  # first of a PID namespace
        self.gaps: tuple[str, ...] = ()  # ways in which they are not kept apart
        self._home = -1  # descriptor of our PID namespace
        self._is_away = False  # the next fork begins another

    @classmethod
    def found(cls) -> "Confinement":
        """Try what this machine allows, the strictest first."""
        with suppress(ConfigError):
            _program()  # once for all forked processes
        status = Path("/proc/self/status").read_text()
        reads_all = bool(_capabilities(status) >> _READ_FILES & 1)
        user_ids = spare_ids(status, Path("/proc/self/uid_map").read_text())
        # An id of its own keeps a trajectory from signalling others and from root's files.
        ids = [user_ids, range(0)] if user_ids else [user_ids]
        options = [(choice, has_namespaces) for choice in ids for has_namespaces in (True, False)]
        refusals: list[str] = []
        while True:
            choice, has_namespaces = options.pop(0)
            confinement = cls(choice, has_namespaces=has_namespaces, reads_all=reads_all)
            *gaps, last = confinement._tried()
            if last == _ENTERED or not options:
                confinement.gaps = (*gaps, *confinement._shared(), *refusals)
                return confinement
            refusals.append(f"refused: {last}")

    def _shared(self) -> Iterator[str]:
        """Yield what trajectories share."""
        if not self.has_namespaces:
            do = "see" if self._user_ids else "signal"
            yield f"they share a PID namespace, and can {do} each other's processes"
        if not self._user_ids:
            whose = "one user id" if os.geteuid() else "root's user id"
            yield f"they have {whose}, and so its files"
        elif not self._kept:
            yield "they read no more than what everybody may"

    def _tried(self) -> list[str]:
        """Confine a process; return gaps, then ``_ENTERED`` or the reason of the refusal."""
        ours, theirs = socket.socketpair()
        with ours:
            if not os.fork():
                try:
                    self.settle()
                    if pid := self.fork():
                        os.waitpid(pid, 0)
                    else:
                        gaps = [*self.enter(), _ENTERED]
                        for path in (sys.executable, os.__file__, __file__):
                            Path(path).open("rb").close()
                        theirs.sendall("\n".join(gaps).encode())
                except OSError as error:
                    theirs.sendall(str(error).encode())
                finally:
                    os._exit(0)
            theirs.close()
            said = b"".join(iter(lambda: ours.recv(_LINE_BYTES), b"")).decode(errors="replace")
        with suppress(ChildProcessError):  # there are no others before foreign code is loaded
            while True:
                os.waitpid(-1, 0)
        return said.splitlines() or ["its process ended"]

    def settle(self) -> None:
        """Let this process, which has one thread, begin PID namespaces from now on.

        If it needs a user namespace for that, it continues as a child, the first process of a PID
        namespace; the parent waits for the child and ends with its exit code.

        Raises:
            OSError: the kernel refuses.
        """
        if not self.has_namespaces:
            return
        if self.continues_in_child:
            _enter_user_namespace(_NEW_PID | _NEW_MOUNTS)
            if pid := os.fork():
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                os._exit(128 - code if code < 0 else code)
            die_with_parent(0)  # 0 is every process outside of a PID namespace
            with suppress(OSError):  # /proc of another namespace will be a gap
                _mount_proc()
            _set_capabilities(0, permitted=_NAMESPACES)  # so programs and modules have none
        self._home = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        # Registered before handlers of later imports, which may start threads: threads cannot be
        # started anywhere else.
        os.register_at_fork(after_in_parent=self._go_home)

    def fork(self) -> int:
        """Fork on the thread that settled, into a PID namespace of its own if there are any.

        Raises:
            OSError: the kernel refuses.
        """
        if not self.has_namespaces:
            return os.fork()
        self._rise()
        try:
            _checked(_libc.unshare(_NEW_PID), "unshare")
            self._is_away = True
            try:
                pid = os.fork()
            except OSError:
                self._go_home()
                raise
            if pid:
                self._go_home()
            else:
                self._is_away = False
                os.close(self._home)
        finally:
            if self.continues_in_child:
                _set_capabilities(0, permitted=_NAMESPACES)
        return pid

    def _rise(self) -> None:
        """Put the right to namespaces in effect, if it is not."""
        if self.continues_in_child:
            _set_capabilities(_NAMESPACES)

    def _go_home(self) -> None:
        """Let the next fork begin no PID namespace; raise if that fails."""
        if self._is_away and _libc.setns(self._home, _NEW_PID) < 0:
            raise RuntimeError(f"setns: {os.strerror(ctypes.get_errno())}")
        self._is_away = False

    def enter(self, cover: Path | None = None) -> list[str]:
        """Confine this process for good; return gaps.

        Args:
            cover: Folder that it sees empty from now on, if it has mounts of its own.

        Raises:
            OSError: the kernel refuses, or the process has another thread, which would stay free.
        """
        gaps: list[str] = []
        if len(list(Path("/proc/self/task").iterdir())) > 1:
            raise OSError(errno.EBUSY, "a library has started a thread in the fork")
        if self.has_namespaces:
            self._rise()
            _checked(_libc.unshare(_NEW_MOUNTS | _NEW_IPC), "unshare")
            _checked(_libc.mount(None, b"/", None, _PRIVATE_BELOW, None), "mount of / as private")
            try:
                _mount_proc()
            except OSError as error:
                gaps.append(f"they see each other's command lines ({error})")
            if cover is not None:
                _cover(cover)
            if not self._user_ids:
                _enter_user_namespace()
        if self._user_ids:
            self._become(secrets.choice(self._user_ids))
        else:
            _set_capabilities(0 if self.has_namespaces else self._kept)
        keep_memory_private()
        try:
            _prctl(_NO_NEW_PRIVILEGES, 1)
            _filter(_program())
        except (OSError, ConfigError) as error:
            gaps.append(f"they may make any system call ({error})")
        return gaps

    def _become(self, uid: int) -> None:
        """Become another user, with root's right to read files and no right to write root's."""
        with suppress(OSError):  # there are fewer
            for capability in range(64):
                if capability != _READ_FILES:
                    _prctl(_DROP_BOUNDING, capability)
        os.setgroups([])
        _prctl(_KEEP_CAPABILITIES, 1)
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        _set_capabilities(self._kept)
        if self._kept:
            _prctl(_AMBIENT, _RAISE, _READ_FILES)


def spare_ids(status: str, uid_map: str) -> range:
    """Return unused user ids; an empty range if we may not choose. Pure.

    Args:
        status: Text of /proc/self/status.
        uid_map: Text of /proc/self/uid_map.
    """
    if _capabilities(status) & _CHOOSE_IDS != _CHOOSE_IDS:
        return range(0)
    rows = [[int(word) for word in line.split()] for line in uid_map.splitlines()]
    first, _, count = max(rows, key=lambda row: row[2], default=(0, 0, 0))
    if first <= _SPARE_IDS.start and _SPARE_IDS.stop <= first + count:
        return _SPARE_IDS
    upper = range(first + count // 2, first + count - 8)  # a container's, without the last ones
    return upper if len(upper) >= _FEWEST_IDS else range(0)


def _capabilities(status: str) -> int:
    effective = next(line for line in status.splitlines() if line.startswith("CapEff:"))
    return int(effective.split()[1], 16)


def _mount_proc() -> None:
    """Let /proc show the processes of our PID namespace."""
    proc = _libc.mount(b"proc", b"/proc", b"proc", _NO_PROGRAMS, None)
    _checked(proc, "mount of /proc")


def _cover(folder: Path) -> None:
    """Cover a folder by an empty one that is read-only."""
    flags = _READ_ONLY | _NO_PROGRAMS
    covered = _libc.mount(b"none", os.fsencode(folder), b"tmpfs", flags, b"size=4k,mode=0755")
    _checked(covered, f"mount of {folder}")


def _enter_user_namespace(further: int = 0) -> None:
    """Enter a user namespace of our own, with our user in it alone, and further namespaces."""
    uid, gid = os.geteuid(), os.getegid()
    _prctl(_SET_DUMPABLE, 1)  # else its maps are root's
    _checked(_libc.unshare(_NEW_USER | further), "unshare of a user namespace")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    keep_memory_private()


def _prctl(option: int, value: int, third: int = 0) -> None:
    _checked(_libc.prctl(option, value, third, 0, 0), f"prctl {option}")


def _set_capabilities(effective: int, permitted: int = 0) -> None:
    """Give up all capabilities but those of these masks; those in effect are permitted."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_V3, 0)
    wanted = (ctypes.c_uint32 * 6)(effective, permitted | effective, effective)
    _checked(_libc.capset(header, wanted), "capset")


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("lines", ctypes.c_char_p))


@functools.cache
def _program() -> bytes:
    return compiled(trajectory_filter(os.uname().machine))


def _filter(program: bytes) -> None:
    given = _Program(len(program) // 8, program)
    address = ctypes.cast(ctypes.pointer(given), ctypes.c_void_p).value or 0
    _prctl(_SET_SECCOMP, _FILTER, address)


def _checked(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
