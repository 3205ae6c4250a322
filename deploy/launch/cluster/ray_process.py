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
from slipstream.wire.errors import ChildDiedError, ConfigError, SlipstreamError, text_of
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
    niceness: int = 0
    log_offset: int = 0  # bytes of its role's log that were fetched

    @property
    def where(self) -> str:
        """Name and address of the node."""
        return f"{self.hostname} ({self.address})"

    def free_port(self, count: int) -> int:
        """Return the first of neighboring free ports, as RoleHost.free_port does."""
        return int(result_of(self.actor.free_port.remote(self.address, count)))

    def look(self, module: str, folder: str, request: bytes, limit_s: float) -> bytes:
        """Ask a program that looks at the host, as RoleHost.look does."""
        try:
            return bytes(result_of(self.actor.look.remote(module, folder, request, limit_s)))
        except SlipstreamError as error:
            raise ChildDiedError(f"{self.address}: {text_of(error)}") from error


class Placement(Protocol):
    """What a process asks of the places of its run."""

    def host_of(self, plan: RolePlan, is_wanted: Callable[[], bool]) -> PlacedHost | None:
        """Return the host of a role, on another node if the last node is gone.

        None without a host, if it is not wanted any more when its turn comes.

        Raises:
            ChildDiedError: the cluster has no place within deploy.ray.start_timeout_s.
        """

    def request(
        self, plan: RolePlan, arguments: Sequence[str], host: PlacedHost, rendezvous: "Future[str]"
    ) -> StartRole:
        """Return the request to start a role there, with additional arguments.

        The learner's nodes meet at ``rendezvous``, which the first of them decides.
        """

    def forget(self, name: str, host: PlacedHost | None) -> str:
        """Give up a host that no longer answers, None without one; return the reason."""


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
    _place: PlacedHost | None = None
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
            self.ended_because = self.placement.forget(name, self._place)
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
        plan = self.plan
        host = self._place = self.placement.host_of(plan, lambda: self.poll() is None)
        if host is None:
            return EXIT_FAILED  # in vain: it has the code of its end
        request = self.placement.request(plan, self.arguments, host, self.rendezvous)
        if (code := self.poll()) is not None:  # ended before it was started
            return code
        pid = result_of(host.actor.start.remote(msgspec.json.encode(request)))
        with self._lock:
            self._host = host
            if (code := self.poll()) is not None:
                host.actor.signal.remote(signal.SIGKILL)
                return code
        _log.info("%s is process %d on %s", plan.name, pid, host.address)
        is_reached = True
        with self.log_file.open("ab") as log:
            while True:
                try:
                    answer, text = result_of(host.actor.observe.remote(host.log_offset, _OBSERVE_S))
                except HostUnreachableError:  # but not given up
                    if is_reached:
                        _log.warning("%s: its node %s cannot be reached", plan.name, host.address)
                    is_reached = False
                    time.sleep(_OBSERVE_S)
                    continue
                is_reached = True
                with suppress(OSError):  # disk full; the role's own log is on its host
                    log.write(text)
                    log.flush()
                host.log_offset += len(text)
                seen = msgspec.json.decode(answer, type=RoleState)
                self._signs, self._words, self.sockets = seen.signs, seen.words, seen.sockets
                if seen.code is not None and not text:
                    return seen.code
