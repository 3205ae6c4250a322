"""An environment that hides memory in a process whose first thread has ended."""

import asyncio
import ctypes
import os
import threading

from slipstream.generators.environments.sdk import Environment, Reply, Step

_EXIT = {"x86_64": 60, "aarch64": 93}[os.uname().machine]  # of a thread alone


class FirstThreadEnds(Environment):
    """Waits for ever, to be killed."""

    async def step(self, _reply: Reply) -> Step:
        if not os.fork():
            threading.Thread(target=_hold).start()
            ctypes.CDLL(None).syscall(_EXIT, 0)
        await asyncio.Event().wait()
        return Step(done=True)


def _hold() -> None:
    held = bytearray(os.urandom(1 << 20) * 800)
    threading.Event().wait()
    del held
