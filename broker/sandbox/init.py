"""Runs one command and ends with everything that came from it: process 1 of a sandbox.

A script for ``python -I -S init.py REPORT PARENT UID LIMITS COMMAND...``: the standard library
only, and none of our modules, because it runs before untrusted code. ``sandbox.py`` starts
it. Under bubblewrap the kernel kills all others when process 1 ends; without, this process is the
subreaper of the command and kills its descendants.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time

TYPE_CHECKING = False  # importing typing takes a tenth of our time
if TYPE_CHECKING:
    from typing import NoReturn

_SET_DEATH_SIGNAL, _SET_DUMPABLE, _DROP_BOUNDING, _SET_SUBREAPER = 1, 4, 24, 36
_CAPABILITIES_V3 = 0x20080522
_NOBODY = 65534
_SETUP_FAILED = 125
_KILL_S = 10.0
_STANDARD = (0, 1, 2)

libc = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, value: int) -> int:
    """Call prctl, which reads whole registers."""
    zero = ctypes.c_ulong(0)
    return int(libc.prctl(option, ctypes.c_ulong(value), zero, zero, zero))


class Init:
    """Options of the command line."""

    def __init__(self, arguments: list[str]) -> None:
        report, parent, uid, limits, *self.command = arguments
        self.report = int(report)  # descriptor; -1 for a trusted command
        self.parent = int(parent)
        self.uid = int(uid)  # user of the command; 0 keeps ours
        self.limits = dict(limit.split("=") for limit in limits.split(",") if limit)
        self.in_namespace = os.getpid() == 1
        self.main = 0  # the command's process

    def run(self) -> NoReturn:
        """Start the command, reap until it ends, kill the rest."""
        if not self.in_namespace:
            prctl(_SET_SUBREAPER, 1)  # daemons become our children
            signal.signal(signal.SIGTERM, lambda *_: self.finish(_SETUP_FAILED))
            prctl(_SET_DEATH_SIGNAL, signal.SIGTERM)
            if os.getppid() != self.parent:
                os._exit(_SETUP_FAILED)
        elif self.report >= 0:
            prctl(_SET_DUMPABLE, 0)  # the command may have our user id
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self.main = os.fork()
        if not self.main:
            self.become()
        self.let_go()
        while True:
            pid, status = os.wait()
            if pid == self.main:
                code = os.waitstatus_to_exitcode(status)
                used = resource.getrusage(resource.RUSAGE_CHILDREN)
                self.send(f"ended {code} {used.ru_utime + used.ru_stime} {used.ru_maxrss * 1024}")
                self.finish(128 - code if code < 0 else code)

    def become(self) -> NoReturn:
        """Turn into the command."""
        try:
            os.setsid()
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)
            if self.uid:
                self.lose_privileges()
            self.set_limits()
            if not self.in_namespace:
                prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
            if self.report >= 0:
                os.set_inheritable(self.report, False)
                os.unsetenv("PWD")  # bubblewrap adds it
                self.send("started")
            os.execvp(self.command[0], self.command)  # noqa: S606 this script's purpose
        except OSError as error:
            self.send(f"error {error}")
            os.write(2, f"{self.command[0]}: {error}\n".encode())
        finally:
            os._exit(_SETUP_FAILED)

    def lose_privileges(self) -> None:
        """Become another user for good, without any capability."""
        for capability in range(64):
            if prctl(_DROP_BOUNDING, capability) < 0:
                break
        os.setgroups([])
        for uid in (self.uid, _NOBODY):  # a container may have few users
            try:
                os.setresgid(uid, uid, uid)
                os.setresuid(uid, uid, uid)
                break
            except OSError:
                if uid == _NOBODY:
                    raise
        header = (ctypes.c_uint32 * 2)(_CAPABILITIES_V3, 0)
        if libc.capset(header, (ctypes.c_uint32 * 6)()) < 0:
            raise OSError(ctypes.get_errno(), "capset")

    def set_limits(self) -> None:
        """Set limits by their names in ``resource``, never above ours; the stack may be raised."""
        for name, wanted in self.limits.items():
            kind = getattr(resource, f"RLIMIT_{name}")
            most = resource.getrlimit(kind)[1]
            value = int(wanted) if most == resource.RLIM_INFINITY else min(int(wanted), most)
            resource.setrlimit(kind, (value, most if name == "STACK" else value))

    def send(self, line: str) -> None:
        """Report to the process that started us; without a reader there is nothing to run for."""
        if self.report >= 0:
            try:
                os.write(self.report, line.encode() + b"\n")
            except OSError:
                os._exit(_SETUP_FAILED)

    def let_go(self) -> None:
        """Close all descriptors but the report, so that readers see the command close theirs."""
        nothing = os.open("/dev/null", os.O_RDWR)
        for standard in _STANDARD:
            os.dup2(nothing, standard)
        most = min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], 1 << 20)
        if self.report >= 0:
            os.closerange(3, self.report)
        os.closerange(max(3, self.report + 1), most if most > 0 else 1 << 20)

    def finish(self, exit_code: int) -> NoReturn:
        """End; outside of a namespace, kill everything below us first."""
        if not self.in_namespace:
            if self.main:
                kill(-self.main)  # all of a simple fork bomb at once
            deadline_s = time.monotonic() + _KILL_S
            while time.monotonic() < deadline_s:
                with open("/proc/thread-self/children") as file:  # noqa: PTH123 slow to import
                    for pid in file.read().split():
                        kill(int(pid))  # its children become ours
                try:
                    while os.waitpid(-1, os.WNOHANG)[0]:
                        pass
                except ChildProcessError:
                    break
                time.sleep(0.001)
        os._exit(exit_code)


def kill(pid: int) -> None:
    """Kill a process, or with a negative id a process group, if it is still there."""
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        return


if __name__ == "__main__":
    Init(sys.argv[1:]).run()
