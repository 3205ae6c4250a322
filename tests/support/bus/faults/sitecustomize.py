"""On the path of a relay: Python imports this first, and the relay can be killed at any message.

A file in the folder that RELAY_FAULTS names, relay-NUMBER.kill, holds how many messages that relay
sends or takes before it is killed; then the file is gone.
"""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

WORDS = Path("/proc/self/cmdline").read_text().split("\0")
NUMBER = WORDS[WORDS.index("--part") + 1] if "--part" in WORDS else "0"
ORDER = Path(os.environ["RELAY_FAULTS"]) / f"relay-{NUMBER}.kill"  # noqa: TID251


def counted(work: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same, which counts what succeeded."""

    def call(*arguments: object, **named: object) -> object:
        result = work(*arguments, **named)
        if ORDER.exists():
            left = int(ORDER.read_text()) - 1
            if left > 0:
                ORDER.write_text(str(left))
            else:
                ORDER.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
        return result

    return call


for name in ("send", "send_multipart", "recv_multipart"):
    setattr(zmq.Socket, name, counted(getattr(zmq.Socket, name)))
