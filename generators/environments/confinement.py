"""Keeps the process of a trajectory from its loader and from its neighbours, by the kernel.

Each has a PID namespace, mounts and IPC objects of its own, and a filter of system calls. Where the
loader may choose user ids each has one of its own; elsewhere it has a user namespace of its own. Of
root's rights it has that to read files, or none (docs/adr/0059).
"""

import ctypes
import os
import secrets
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from slipstream.broker.sandbox.system_calls import compiled, trajectory_filter
from slipstream.wire.errors import ConfigError

_NEW_MOUNTS, _NEW_IPC, _NEW_USER, _NEW_PID = 0x00020000, 0x08000000, 0x10000000, 0x20000000
_PRIVATE_BELOW = (1 << 18) | (1 << 14)  # MS_PRIVATE, MS_REC
_NO_PROGRAMS = 2 | 4 | 8  # MS_NOSUID, MS_NODEV, MS_NOEXEC
_SET_DUMPABLE, _KEEP_CAPABILITIES, _SET_SECCOMP, _DROP_BOUNDING = 4, 8, 22, 24
_NO_NEW_PRIVILEGES, _AMBIENT, _RAISE, _FILTER = 38, 47, 2, 2
_CAPABILITIES_V3 = 0x20080522
_READ_FILES = 2  # CAP_DAC_READ_SEARCH
_CHOOSE_IDS = (1 << 7) | (1 << 6)  # CAP_SETUID, SETGID
_SPARE_IDS = range(1_883_242_496, 1_883_242_496 + (1 << 22))
_FEWEST_IDS = 1 << 12
_LINE_BYTES = 4096
_ENTERED = "entered"

_libc = ctypes.CDLL(None, use_errno=True)


def keep_memory_private() -> None:
    """Have no other process of this user read this one's memory, unless it is root."""
    _prctl(_SET_DUMPABLE, 0)


class Confinement:
    """What trajectories of one loader are kept apart by; decided before the first."""

    def __init__(self, user_ids: range, *, has_namespaces: bool, reads_all: bool) -> None:
        """Take what keeps them apart.

        Args:
            user_ids: to choose from; none leaves them ours, in a user namespace each if they have
                namespaces.
            has_namespaces: a PID namespace each, with mounts and IPC objects of its own.
            reads_all: we may read all files; it is the one capability that they may keep.
        """
        self._user_ids = user_ids
        self.has_namespaces = has_namespaces
        self._kept = int(reads_all) << _READ_FILES
        self.gaps: tuple[str, ...] = ()  # what does not hold here

    @classmethod
    def found(cls) -> "Confinement":
        """Try what this machine allows, the most first."""
        status = Path("/proc/self/status").read_text()
        reads_all = bool(_capabilities(status) >> _READ_FILES & 1)
        user_ids = spare_ids(status, Path("/proc/self/uid_map").read_text())
        # An id of its own keeps a trajectory from signalling others and from root's files.
        ids = [user_ids, range(0)] if user_ids else [user_ids]
        options = [(one, has_namespaces) for one in ids for has_namespaces in (True, False)]
        refusals: list[str] = []
        while True:
            one, has_namespaces = options.pop(0)
            confinement = cls(one, has_namespaces=has_namespaces, reads_all=reads_all)
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
        """Confine a process; return gaps, at last ``_ENTERED`` or why it could not be."""
        ours, theirs = socket.socketpair()
        with ours:
            if not os.fork():
                try:
                    self.leave()
                    if not self.has_namespaces or not os.fork():
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

    def leave(self) -> None:
        """Have the next fork of this process, which has one thread, begin namespaces of its own.

        Raises:
            OSError: the kernel refuses.
        """
        if not self.has_namespaces:
            return
        new = _NEW_PID | _NEW_MOUNTS | _NEW_IPC
        if self._user_ids:
            _checked(_libc.unshare(new), "unshare")
            return
        uid, gid = os.geteuid(), os.getegid()
        _prctl(_SET_DUMPABLE, 1)  # else its maps are root's
        _checked(_libc.unshare(new | _NEW_USER), "unshare of a user namespace")
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")

    def enter(self) -> list[str]:
        """Confine this process for good; return gaps.

        Raises:
            OSError: the kernel refuses.
        """
        gaps: list[str] = []
        if self.has_namespaces:
            _checked(_libc.mount(None, b"/", None, _PRIVATE_BELOW, None), "mount of / as private")
            try:
                proc = _libc.mount(b"proc", b"/proc", b"proc", _NO_PROGRAMS, None)
                _checked(proc, "mount of /proc")
            except OSError as error:
                gaps.append(f"they see each other's command lines ({error})")
        if self._user_ids:
            self._become(secrets.choice(self._user_ids))
        else:
            _keep_capabilities(0 if self.has_namespaces else self._kept)
        keep_memory_private()
        try:
            _prctl(_NO_NEW_PRIVILEGES, 1)
            _filter(compiled(trajectory_filter(os.uname().machine)))
        except (OSError, ConfigError) as error:
            gaps.append(f"they may make any system call ({error})")
        return gaps

    def _become(self, uid: int) -> None:
        """Become another user, who may read what root may, and write what everybody may."""
        for capability in range(64):
            if capability != _READ_FILES:
                with suppress(OSError):  # there are fewer
                    _prctl(_DROP_BOUNDING, capability)
        os.setgroups([])
        _prctl(_KEEP_CAPABILITIES, 1)
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        _keep_capabilities(self._kept)
        if self._kept:
            _prctl(_AMBIENT, _RAISE, _READ_FILES)


def spare_ids(status: str, uid_map: str) -> range:
    """Return user ids that nobody else has here, none if we may not choose. Pure.

    Args:
        status: text of /proc/self/status.
        uid_map: text of /proc/self/uid_map.
    """
    if _capabilities(status) & _CHOOSE_IDS != _CHOOSE_IDS:
        return range(0)
    rows = [[int(word) for word in line.split()] for line in uid_map.splitlines()]
    first, _, count = max(rows, key=lambda row: row[2], default=(0, 0, 0))
    if first <= _SPARE_IDS.start and _SPARE_IDS.stop <= first + count:
        return _SPARE_IDS
    upper = range(first + count // 2, first + count - 8)  # a container's: the last is nobody
    return upper if len(upper) >= _FEWEST_IDS else range(0)


def _capabilities(status: str) -> int:
    effective = next(line for line in status.splitlines() if line.startswith("CapEff:"))
    return int(effective.split()[1], 16)


def _prctl(option: int, value: int, third: int = 0) -> None:
    words = [ctypes.c_ulong(word) for word in (value, third, 0, 0)]
    _checked(_libc.prctl(option, *words), f"prctl {option}")


def _keep_capabilities(kept: int) -> None:
    """Give up all capabilities but those of a mask below 32."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_V3, 0)
    wanted = (ctypes.c_uint32 * 6)(kept, kept, kept, 0, 0, 0)
    _checked(_libc.capset(header, wanted), "capset")


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("lines", ctypes.c_char_p))


def _filter(program: bytes) -> None:
    given = _Program(len(program) // 8, program)
    address = ctypes.cast(ctypes.pointer(given), ctypes.c_void_p).value or 0
    _prctl(_SET_SECCOMP, _FILTER, address)


def _checked(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
