import errno
from pathlib import Path

import pytest

from broker.rewards import jail, sandbox
from broker.rewards.sandbox import Limits, SandboxUnavailableError
from wire.errors import ConfigError

ALLOWED, REFUSED, KILLED = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000
X86, ARM = 0xC000003E, 0xC00000B7


def answer_of_filter(machine: str, *, audit: int, number: int, first_argument: int = 0) -> int:
    """Interpret the few BPF instructions that the filter is made of."""
    fields = {0: number, 4: audit, 16: first_argument}
    program = jail.system_call_filter(machine)
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


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (0, ALLOWED),  # read
        (59, ALLOWED),  # execve
        (101, REFUSED),  # ptrace
        (165, REFUSED),  # mount
        (319, REFUSED),  # memfd_create
        (442, REFUSED),  # mount_setattr
        (435, 0x00050000 | errno.ENOSYS),  # clone3: libc tries clone then
        (0x40000000, REFUSED),  # x32
    ],
)
def test_the_filter_refuses_what_reaches_for_more(number: int, expected: int):
    assert answer_of_filter("x86_64", audit=X86, number=number) == expected


def test_a_process_may_be_cloned_but_no_namespace():
    for machine, audit, clone in [("x86_64", X86, 56), ("aarch64", ARM, 220)]:
        fork = answer_of_filter(machine, audit=audit, number=clone, first_argument=17)
        users = answer_of_filter(machine, audit=audit, number=clone, first_argument=0x10000000)
        assert (fork, users) == (ALLOWED, REFUSED)


def test_calls_of_another_architecture_end_the_process():
    assert answer_of_filter("x86_64", audit=0x40000003, number=0) == KILLED
    assert jail.system_call_filter("riscv64") == []


@pytest.mark.parametrize("name", ["/etc/passwd", "../up", "a/../../up", "", "nul\0"])
def test_a_file_cannot_leave_the_work_folder(name: str):
    with pytest.raises(ValueError, match="inside the work folder"):
        sandbox.run("", files={name: b""})


@pytest.mark.parametrize(
    ("code", "stderr", "expected"),
    [
        (0, b"MemoryError", "ok"),
        (1, b"Traceback:\nMemoryError\n", "memory"),
        (1, b"MemoryError\nValueError: no\n", "failed"),
        (-24, b"", "timeout"),
        (-9, b"", "failed"),
        (None, b"", "failed"),
    ],
)
def test_an_end_is_named_by_exit_code_and_last_words(
    code: int | None, stderr: bytes, expected: str
):
    assert sandbox._status_of(code, stderr) == expected


def test_a_refusal_names_the_setting_and_the_reason():
    said = sandbox._why_not("unshare(): Operation not permitted (EPERM)")
    assert "reward.sandbox" in said
    assert "EPERM" in said
    if Path("/proc/sys/user/max_user_namespaces").exists():
        assert "user.max_user_namespaces = " in said
    assert issubclass(SandboxUnavailableError, ConfigError)


def test_the_jail_gets_looser_limits_than_the_run():
    limits = Limits(cpu_s=1.5, memory_bytes=1000, max_processes=10)
    with_namespaces = sandbox._rlimits(limits, "namespaces")
    without = sandbox._rlimits(limits, "none")
    assert with_namespaces["CPU"] == 3
    assert with_namespaces["NPROC"] > 10
    assert with_namespaces["CORE"] == 0
    assert "NPROC" not in without  # it would count all that the user runs


def test_a_jailed_command_comes_last_and_whole():
    argv = sandbox.jailed(["python", "-c", "x; y"], hide=[Path("/keys")])
    assert argv[-3:] == ["python", "-c", "x; y"]
    assert '"hide": ["/keys"]' in argv[-4]
