"""The system calls that foreign code may not make, as BPF: a model's, and trajectories'. Pure."""

import errno
import signal
import struct
from collections.abc import Mapping

from slipstream.wire.errors import ConfigError

# Calls that reach into other processes, for more rights, or for what is hidden: ptrace,
# process_vm_readv, process_vm_writev, bpf, perf_event_open; mount, umount2, pivot_root, setns,
# open_by_handle_at; add_key, request_key, keyctl; pidfd_getfd, and open_tree to fspick,
# mount_setattr, open_tree_attr, which have one number everywhere.
_REACHING_OUT = {
    "x86_64": (101, 310, 311, 321, 298, 165, 166, 155, 308, 304, 248, 249, 250),
    "aarch64": (117, 270, 271, 280, 241, 40, 39, 41, 268, 265, 217, 218, 219),
}
_REACHING_OUT_ANYWHERE = (438, 428, 429, 430, 431, 432, 433, 442, 467)
# Calls that leave traces or memory outside of the limits: memfd_create, memfd_secret, shmget,
# shmat, msgget, semget, mq_open; userfaultfd, chroot, unshare, io_uring_setup; vmsplice (a pipe
# keeps a whole large page for a part of it), inotify_init, inotify_init1, inotify_add_watch,
# fanotify_init (events wait in kernel memory).
_UNBOUNDED = {
    "x86_64": (
        *(319, 447, 29, 30, 68, 64, 240),  # memfd_create to mq_open
        *(323, 161, 272, 425),
        *(278, 253, 294, 254, 300),  # vmsplice to fanotify_init
    ),
    "aarch64": (*(279, 447, 194, 196, 186, 190, 180), *(282, 51, 97, 425), *(75, 26, 27, 262)),
}
_ARCHITECTURE = {"x86_64": (0xC000003E, 56), "aarch64": (0xC00000B7, 220)}  # and clone
_CLONE3 = 435
# Checked by their arguments: socket, socketpair; mmap; rt_sigaction; prlimit64; setsockopt and
# fcntl.
_BY_ARGUMENT = {
    "x86_64": ((41, 53), 9, 13, 302, 54, 72),
    "aarch64": ((198, 199), 222, 134, 261, 208, 25),
}
_RANGE_LOCKS = (6, 7, 37, 38)  # F_SETLK, F_SETLKW, F_OFD_SETLK, F_OFD_SETLKW
_BUFFER_SIZES = (7, 8, 32, 33)  # SO_SNDBUF, SO_RCVBUF, and both by force
_FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6: separated by a network namespace
_SHARED_ANONYMOUS = 0x21  # MAP_SHARED | MAP_ANONYMOUS
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_KEEP_BITS = 0x54
_NUMBER, _CPU = 0, 4  # offsets in a filter's input; then the arguments, low half first
_ARGUMENTS = 16
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
_REFUSAL = (_RETURN, 0, 0, _REFUSE | errno.EPERM)

_INSTRUCTION = struct.Struct("=HBBI")  # code, if true, if false, value
# clone: NEWCGROUP, NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET.
_NEW_NAMESPACES = 0x7E020000


def compiled(program: list[tuple[int, int, int, int]]) -> bytes:
    """Return a filter as the kernel reads it."""
    return b"".join(_INSTRUCTION.pack(*line) for line in program)


def trajectory_filter(machine: str) -> list[tuple[int, int, int, int]]:
    """Return a BPF program that refuses what reaches out of a process, and no more.

    Raises:
        ConfigError: the system calls of this CPU are not known.
    """
    return [*_refusing(machine, _REACHING_OUT), (_RETURN, 0, 0, _ALLOW)]


def _refusing(
    machine: str, *refused: Mapping[str, tuple[int, ...]]
) -> list[tuple[int, int, int, int]]:
    if machine not in _ARCHITECTURE:
        raise ConfigError(
            f"no system calls are known of the CPU {machine}: "
            'reward.sandbox = "namespaces" does not work here'
        )
    audit, _ = _ARCHITECTURE[machine]
    program = [(_LOAD, 0, 0, _CPU), (_EQUAL, 1, 0, audit), (_RETURN, 0, 0, _KILL)]
    program += [(_LOAD, 0, 0, _NUMBER)]
    if machine == "x86_64":
        program += [(_AT_LEAST, 0, 1, 0x40000000), _REFUSAL]  # the x32 numbers
    numbers = [number for kind in refused for number in kind[machine]]
    for number in (*numbers, *_REACHING_OUT_ANYWHERE):
        program += [(_EQUAL, 0, 1, number), _REFUSAL]
    return program


def system_call_filter(machine: str) -> list[tuple[int, int, int, int]]:
    """Return a BPF program that refuses some system calls, one instruction per line.

    Raises:
        ConfigError: the system calls of this CPU are not known.
    """
    program = _refusing(machine, _REACHING_OUT, _UNBOUNDED)
    _, clone = _ARCHITECTURE[machine]
    refuse = _REFUSAL
    # clone3 keeps its flags in memory, where a filter cannot read: libc falls back to clone.
    program += [(_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _REFUSE | errno.ENOSYS)]
    allow = (_RETURN, 0, 0, _ALLOW)
    program += _by_argument(clone, 0, [(_ANY_BIT, 0, 1, _NEW_NAMESPACES), refuse])
    sockets, mmap, sigaction, prlimit, setsockopt, fcntl = _BY_ARGUMENT[machine]
    families = [line for family in _FAMILIES for line in ((_EQUAL, 0, 1, family), allow)]
    for number in sockets:
        program += _by_argument(number, 0, [*families, refuse])
    # Pages of such memory stay when no process maps them, and then count for no process.
    shared = [(_KEEP_BITS, 0, 0, _SHARED_ANONYMOUS), (_EQUAL, 0, 1, _SHARED_ANONYMOUS), refuse]
    program += _by_argument(mmap, 3, shared)
    # Ignoring SIGCHLD hides children's usage. Reading the action (no new one) is allowed.
    new_action = [(_LOAD, 0, 0, _ARGUMENTS + 8), (_EQUAL, 1, 0, 0), refuse]
    new_action += [(_LOAD, 0, 0, _ARGUMENTS + 12), (_EQUAL, 1, 0, 0), refuse]
    of_child = [(_EQUAL, 0, len(new_action), signal.SIGCHLD), *new_action]
    program += _by_argument(sigaction, 0, of_child)
    program += _by_argument(prlimit, 0, [(_EQUAL, 1, 0, 0), refuse])  # one's own limits
    # Data waiting in a socket is kernel memory, which no limit counts: only the default sizes.
    sizes = [line for option in _BUFFER_SIZES for line in ((_EQUAL, 0, 1, option), refuse)]
    program += _by_argument(setsockopt, 2, sizes)
    # A file may have any number of range locks, each some kernel memory, and no limit counts them.
    # Locks on whole files (flock) are as few as descriptors.
    no_locks = (_RETURN, 0, 0, _REFUSE | errno.ENOLCK)
    locks = [line for kind in _RANGE_LOCKS for line in ((_EQUAL, 0, 1, kind), no_locks)]
    program += _by_argument(fcntl, 1, locks)
    return [*program, allow]


def _by_argument(
    number: int, argument: int, lines: list[tuple[int, int, int, int]]
) -> list[tuple[int, int, int, int]]:
    """Return lines that check the low half of one argument of a call; past them it is allowed."""
    load = (_LOAD, 0, 0, _ARGUMENTS + 8 * argument)
    inner = [load, *lines, (_RETURN, 0, 0, _ALLOW)]
    return [(_EQUAL, 0, len(inner), number), *inner]
