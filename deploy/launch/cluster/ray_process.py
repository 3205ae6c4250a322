"""A process of a role on a node of a Ray cluster, followed by a thread of the supervisor."""

import logging
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec

from slipstream.deploy.launch.cluster.ray_calls import (
    Actor,
    HostCallError,
    HostLostError,
    HostUnreachableError,
    result_of,
)
from slipstream.deploy.launch.cluster.role_host import RoleState, StartRole
from slipstream.deploy.launch.plan import RolePlan
from slipstream.wire.errors import ChildDiedError, ConfigError, SlipstreamError
from slipstream.wire.process.command_line import EXIT_BAD_SETTINGS, EXIT_FAILED
from slipstream.wire.process.patience import Signs

_log = logging.getLogger(__name__)
_OBSERVE_S = 0.5


@dataclass(slots=True)
class PlacedHost:
    """A role host and its node."""

    actor: Actor
    node: str
    address: str
    hostname: str
    log_offset: int = 0  # bytes of its role's log that were fetched

    @property
    def where(self) -> str:
        """Name and address of the node."""
        return f"{self.hostname} ({self.address})"


class Placement(Protocol):
    """What a process asks of the places of its run."""

    def host_of(self, plan: RolePlan) -> PlacedHost:
        """Return the host of a role, on another node if the last node is gone.

        Raises:
            ChildDiedError: the cluster has no place within deploy.ray.start_timeout_s.
        """

    def request(
        self, plan: RolePlan, arguments: Sequence[str], host: PlacedHost, rendezvous: "Future[str]"
    ) -> StartRole:
        """Return the request to start a role there, with additional arguments.

        The learner's nodes meet at ``rendezvous``, which the first of them decides.
        """

    def forget(self, name: str) -> str:
        """Give up a host that no longer answers; return the reason."""


class RayStarter:
    """Starts roles on the nodes of a cluster."""

    def __init__(self, placement: Placement, give_back: Callable[[str], None]) -> None:
        self.processes: dict[str, RayProcess] = {}  # newest process of each name
        self.give_back = give_back  # frees the place of a role that has ended
        self._placement = placement
        self._rendezvous: Future[str] = Future()  # address of the learner's nodes

    def start(self, plan: RolePlan, arguments: Sequence[str], log_file: Path) -> "RayProcess":
        """Start a role; its process is placed in the background.

        Raises:
            ChildDiedError: the role cannot restart, because its node is gone.
        """
        before = self.processes.get(plan.name)
        if plan.serves_others and before is not None and before.lost:
            raise ChildDiedError(
                f"{plan.name} cannot be started again: {before.ended_because}. Its store is there: "
                "bring the node back, then --resume auto"
            )
        if plan.part_of and plan.name == "learner":  # the other nodes start after it
            self._rendezvous = Future()
        process = RayProcess(self._placement, plan, arguments, log_file, self._rendezvous)
        self.processes[plan.name] = process
        threading.Thread(target=process.follow, name=plan.name, daemon=True).start()
        return process

    def let_go(self) -> None:
        """Do nothing: role hosts end what outlives a role when they are closed."""


@dataclass(eq=False, slots=True)
class RayProcess:
    """One process of a role on a node of the cluster; ``follow`` starts it."""

    placement: Placement
    plan: RolePlan
    arguments: Sequence[str]
    log_file: Path
    rendezvous: "Future[str]"
    ended_because: str = ""
    lost: bool = False  # True if its node, or the process that watched it, is gone
    sockets: tuple[str, ...] = ()
    _words: str = ""
    _signs: Signs = Signs(0.0, 0, 0)  # noqa: RUF009 immutable
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _code: int | None = None
    _host: PlacedHost | None = None  # set once it runs

    def poll(self) -> int | None:
        """Return the exit code; None while the process runs."""
        return self._code

    def send_signal(self, signum: int, /) -> None:
        """Send a signal; a process that is not placed yet is not started."""
        with self._lock:
            if self._code is None and self._host is not None:
                self._host.actor.signal.remote(int(signum))
            elif self._code is None:
                self._code = -signum

    def signs(self) -> Signs:
        """Return the signs of life that the host saw last."""
        return self._signs

    def last_words(self) -> str:
        """Return the last line of the process; empty if unknown."""
        return self._words

    def release(self) -> None:
        """Do nothing: the role host removes what is left before the next start."""

    def follow(self) -> None:
        """Place and start the process, and observe it to its end."""
        name = self.plan.name
        code = EXIT_FAILED
        try:
            code = self._run()
        except ConfigError as error:
            self._words, code = str(error), EXIT_BAD_SETTINGS
        except HostLostError:
            self.lost = True
            self.ended_because = self.placement.forget(name)
        except HostCallError as error:
            self.ended_because = str(error)
            with suppress(OSError), self.log_file.open("a") as log:
                log.write(f"{name} is not followed any more: {error.text}\n")
            self._end_unfollowed()
        except SlipstreamError as error:
            self.ended_because = str(error)
        except TimeoutError:
            self.ended_because = "the learner's first node has not been placed"
        except Exception:  # noqa: BLE001 the supervisor would wait for it for ever
            _log.exception("%s is not followed any more", name)
            self.ended_because = "by a fault of this program"
            self._end_unfollowed()
        finally:
            with self._lock:
                self._code = code if self._code is None else self._code

    def _end_unfollowed(self) -> None:
        """Kill a process that may still run unobserved: another one may be started."""
        if self._host is not None:
            with suppress(SlipstreamError):
                result_of(self._host.actor.signal.remote(signal.SIGKILL))

    def _run(self) -> int:
        host = self.placement.host_of(self.plan)
        request = self.placement.request(self.plan, self.arguments, host, self.rendezvous)
        if (code := self.poll()) is not None:  # ended before it was started
            return code
        pid = result_of(host.actor.start.remote(msgspec.json.encode(request)))
        with self._lock:
            self._host = host
            if (code := self.poll()) is not None:
                host.actor.signal.remote(signal.SIGKILL)
                return code
        _log.info("%s is process %d on %s", self.plan.name, pid, host.address)
        with self.log_file.open("ab") as log:
            while True:
                answer, text = self._observed(host)
                with suppress(OSError):  # disk full; the role's own log is on its host
                    log.write(text)
                    log.flush()
                host.log_offset += len(text)
                seen = msgspec.json.decode(answer, type=RoleState)
                self._signs, self._words, self.sockets = seen.signs, seen.words, seen.sockets
                if seen.code is not None and not text:
                    return seen.code

    def _observed(self, host: PlacedHost) -> tuple[bytes, bytes]:
        """Ask for the state; repeat while the host is unreachable but not given up."""
        is_logged = False
        while True:
            try:
                answer: tuple[bytes, bytes] = result_of(
                    host.actor.observe.remote(host.log_offset, _OBSERVE_S)
                )
            except HostUnreachableError:
                if not is_logged:
                    _log.warning("%s: its node %s cannot be reached", self.plan.name, host.address)
                is_logged = True
                time.sleep(_OBSERVE_S)
            else:
                return answer
