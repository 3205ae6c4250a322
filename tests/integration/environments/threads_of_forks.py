"""An environment whose module starts threads in forks, as some libraries do."""

import os
import threading

from slipstream.generators.environments.sdk import Environment, Reply, Step

_never = threading.Event()
_started: list[threading.Thread] = []


def _start() -> None:
    one = threading.Thread(target=_never.wait, daemon=True)
    one.start()
    _started.append(one)


class StartsThreads(Environment):
    """Starts one after each fork, on the side of ``handler``; says how many were started."""

    def __init__(self, *, handler: str) -> None:
        self._handler = handler

    @staticmethod
    def prepare(*, handler: str) -> None:
        os.register_at_fork(**{handler: _start})

    async def step(self, _reply: Reply) -> Step:
        return Step(done=True, reward=float(len(_started)))
