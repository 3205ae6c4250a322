"""`slipstream run --on ray`: Ray places, starts and watches the roles of a run on a cluster.

The supervisor's rules hold: Ray restarts nothing. Data travel over ZeroMQ, NCCL and Redis.
This is the only module that imports ray.
"""

import logging
import os
import re
import secrets
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.exceptions import (
    ActorUnavailableError,
    GetTimeoutError,
    RayActorError,
    RayError,
    RayTaskError,
)
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from rich.console import Console

from slipstream.broker.config import keys_folder
from slipstream.deploy.config import RunConfig, nearest_folder, resolved_text, write_resolved
from slipstream.deploy.launch.cluster.host_program import Post
from slipstream.deploy.launch.cluster.pools import Pool, pool_of_one, pools_of
from slipstream.deploy.launch.cluster.ray_token import require_token
from slipstream.deploy.launch.cluster.role_host import (
    PYTHON,
    SETTINGS,
    HostFacts,
    Observation,
    RoleHost,
    StartRole,
)
from slipstream.deploy.launch.plan import RolePlan, key_role, kind_of, plan_generator, plan_roles
from slipstream.deploy.launch.session import Session, View, run_in_folder
from slipstream.deploy.launch.signals import Signals
from slipstream.wire.errors import ChildDiedError, ConfigError, SlipstreamError
from slipstream.wire.files.keys import ClientKey, write_client_key
from slipstream.wire.files.run_folder import SETTINGS as SETTINGS_FILE
from slipstream.wire.messages.broker import Role
from slipstream.wire.process.command_line import EXIT_BAD_SETTINGS, EXIT_FAILED
from slipstream.wire.process.patience import Signs
from slipstream.wire.settings.rendezvous import Address

_Actor = Any  # role host; Ray makes its methods at run time
_Answer = Any  # future answer of a role host

_log = logging.getLogger(__name__)
_OBSERVE_S = 0.5
_ANSWER_S = 60.0  # limit for a host; only the cluster decides whether the host is lost
_LOG_EVERY_S = 10.0
_OBSERVER = "run-observer"


class _RayRoleHost(RoleHost):
    """A role host that knows its node."""

    def node(self) -> str:
        """Return the id of this actor's node."""
        return str(ray.get_runtime_context().get_node_id())


@dataclass(slots=True)
class _Host:
    """A role host and its node."""

    actor: _Actor
    node: str
    address: str
    facts: HostFacts
    log_offset: int = 0


def run_on_ray(config: RunConfig, view: View) -> int:
    """Run to the end on a Ray cluster; returns the exit code.

    Raises:
        ConfigError: no such cluster exists, or it cannot run this.
    """
    site = RaySite(config, view.console)  # sets signal handlers, which ours replace
    signals = Signals()
    with signals.handled():
        return run_in_folder(config.run, lambda: Session(config, site, view, signals))


class RayPlaces:
    """The planned nodes of a run, with a program on each that looks at it."""

    is_cluster = True

    def __init__(self, config: RunConfig, console: Console, module: str) -> None:
        """Reserve the places of a run; start nothing there yet.

        Args:
            config: the run.
            console: Console that shows a wait for the cluster.
            module: The program's module.

        Raises:
            ConfigError: no such cluster exists, it has no room, or its nodes cannot run this.
        """
        self._site = RaySite(config, console)
        try:
            self.posts: Sequence[Post] = self._site.posts(module)
            self.config = self._site.addressed()
        except BaseException:
            self._site.close()
            raise

    def close(self) -> None:
        """End the programs and give the nodes back."""
        self._site.close()


class RaySite:
    """The nodes of a Ray cluster: one placement group per pool, one actor per role."""

    def __init__(self, config: RunConfig, console: Console) -> None:
        """Connect to the cluster.

        Raises:
            ConfigError: it cannot be reached.
        """
        self._config = config
        self._console = console
        if not config.broker.broker.keys:  # keys of one run: each run makes its own
            keys = str(config.run.folder.absolute() / "keys")
            self._config = config = config.with_settings("broker", keys=keys)
        _connect(config)
        self._uses_gpus = _num_gpus() > 0 and config.generators.generators.device != "cpu"
        self._pools = pools_of(config, uses_gpus=self._uses_gpus)
        self._groups: dict[str, PlacementGroup] = {}  # pool -> group
        self._hosts: dict[str, _Host] = {}  # process -> host
        self._keys: dict[str, ClientKey] = {}  # name -> key
        self._learner_address = ""
        self.rendezvous: Future[str] = Future()  # address of the learner's nodes
        self._broker_endpoint = ""
        self._bus_endpoint = ""
        self._lock = threading.RLock()
        self.starter = RayStarter(self)
        self.run = config.run

    def plans(self) -> list[RolePlan]:
        """Place every role, check the hosts, make the keys; return the processes.

        Raises:
            ConfigError: the cluster has no room, or its nodes cannot run this.
        """
        config = self._config
        plans = plan_roles(config, Path(SETTINGS), gpus=None, python=PYTHON)
        self._place_pools()
        self._place([plan.name for plan in plans])
        broker, learner = self._hosts["broker"], self._hosts["learner"]
        listen = config.broker.broker.listen
        port = _port_of(listen) or self._free_port(broker, 1)
        self._broker_endpoint = f"tcp://{Address(broker.address, port)}"
        self._publish_from(learner)
        self._make_keys([(_OBSERVER, "observer"), *map(self._key_of, plans[1:])])
        key_file = config.run.folder / f"{_OBSERVER}.key"
        write_client_key(key_file, self._keys[_OBSERVER])
        watched = config.with_settings("run", broker=self._broker_endpoint, key_file=str(key_file))
        write_resolved(watched, config.run.folder / SETTINGS_FILE)
        self.run = watched.run
        for name, host in self._hosts.items():
            self._console.print(f"{name} is on {host.facts.hostname} ({host.address})")
        return plans

    def posts(self, module: str) -> list[Post]:
        """Place a program that looks at its host for each planned process.

        Args:
            module: The program's module.

        Raises:
            ConfigError: the cluster has no room, or its nodes cannot run this.
        """
        plans = plan_roles(self._config, Path(SETTINGS), gpus=None, python=PYTHON)
        self._place_pools()
        self._place([plan.name for plan in plans])
        folder = self._folder

        def asks(host: _Host) -> Callable[[bytes, float], bytes]:
            def ask(request: bytes, limit_s: float) -> bytes:
                try:
                    answer: bytes = _got(host.actor.look.remote(module, folder, request, limit_s))
                except (RayError, ChildDiedError) as error:
                    raise ChildDiedError(f"{host.address}: {_reason(error)}") from error
                return answer

            return ask

        found = self._hosts.items()
        return [Post(name, host.node, host.address, asks(host)) for name, host in found]

    def addressed(self) -> RunConfig:
        """Return the run with the addresses of its placed hosts; unset ports stay open.

        Raises:
            ConfigError: naming the setting.
        """
        bus, broker = self._config.learner.weightbus, self._config.broker.broker
        at = Address(self._hosts["broker"].address, _port_of(broker.listen))
        config = self._config.with_settings("broker", listen=f"tcp://{at}")
        address = self._hosts["learner"].address
        host = address if self._config.deploy.ray.collectives else bus.host
        listen = f"tcp://{Address(address, _port_of(bus.listen))}"
        return config.with_settings("weightbus", listen=listen, host=host)

    def generator(self, name: str) -> RolePlan:
        """Return an additional generator of the run, and ask the cluster for its place."""
        if not any(name in pool.members for pool in self._pools):
            pool = pool_of_one(self._config, name, uses_gpus=self._uses_gpus)
            self._pools = (*self._pools, pool)
            self._groups[pool.name] = self._group(pool)
        return plan_generator(self._config, Path(SETTINGS), name, gpus=None, python=PYTHON)

    def give_back(self, name: str) -> None:
        """Free the place of a process that will not restart; its host ends in the background."""
        host = self._hosts.pop(name, None)
        group = None
        if any(pool.members == (name,) for pool in self._pools):  # a pool of its own
            self._pools = tuple(pool for pool in self._pools if pool.members != (name,))
            group = self._groups.pop(name, None)

        def end() -> None:
            with suppress(RayError):
                if host is not None:
                    _got(host.actor.close.remote())
                    ray.kill(host.actor)
                if group is not None:
                    remove_placement_group(group)

        threading.Thread(target=end, name=f"end of {name}", daemon=True).start()

    def broker_listens(self) -> bool:
        """True once the broker's socket is there."""
        process = self.starter.processes.get("broker")
        return process is not None and "broker.sock" in process.sockets

    def where_to_connect(self) -> str:
        """Return a line on how others reach the run."""
        keys = keys_folder(self._config.run, self._config.broker.broker)
        return f"the broker listens on {self._broker_endpoint}, with keys in {keys}"

    def close(self) -> None:
        """End every role host and give the nodes back."""
        closing = [host.actor.close.remote() for host in self._hosts.values()]
        with suppress(RayError):
            if closing:
                ray.wait(closing, num_returns=len(closing), timeout=_ANSWER_S)
        for host in self._hosts.values():
            with suppress(RayError):
                ray.kill(host.actor)
        for group in self._groups.values():
            with suppress(RayError):
                remove_placement_group(group)
        ray.shutdown()

    # ---- requests of the processes -----------------------------------------------

    def host_of(self, plan: RolePlan) -> _Host:
        """Return the host of a role, on another node if the last node is gone.

        Raises:
            ChildDiedError: the cluster has no place within deploy.ray.start_timeout_s.
        """
        if plan.name not in self._hosts:
            self._place([plan.name])
        return self._hosts[plan.name]

    def forget(self, name: str) -> str:
        """Give up a host that no longer answers; return the reason."""
        if (host := self._hosts.pop(name, None)) is None:
            return "its node left the cluster as it was to be started"
        alive = {node["NodeID"] for node in _nodes() if node["Alive"]}
        with suppress(RayError):
            ray.kill(host.actor)
        where = f"{host.facts.hostname} ({host.address})"
        if host.node not in alive:
            return f"its node {where} left the cluster"
        return f"the process that watched it on {where} ended"

    def request(
        self, plan: RolePlan, arguments: Sequence[str], host: _Host, rendezvous: "Future[str]"
    ) -> StartRole:
        """Return the request to start a role on a host.

        Args:
            plan: The role's plan.
            arguments: Arguments added to those of the plan.
            host: Host of the role.
            rendezvous: Address where the learner's nodes meet; the first node decides it.
        """
        key = None
        words = [*plan.command, *arguments]
        if plan.part_of:
            if plan.name == "learner":
                rendezvous.set_result(str(Address(host.address, self._free_port(host, 1))))
            words += ["--rendezvous", rendezvous.result(self._config.deploy.ray.start_timeout_s)]
        if plan.name == "broker":
            words.append(f"broker.listen={self._broker_endpoint}")
        else:
            with self._lock:
                name, role = self._key_of(plan)
                if name not in self._keys:
                    self._make_keys([(name, role)])
                key = self._keys[name]
            words += [f"run.broker={self._broker_endpoint}"]
        if plan.name == "learner":
            with self._lock:
                self._publish_from(host)
        if self._config.deploy.ray.collectives and kind_of(plan.name) in {"learner", "generator"}:
            words += [f"weightbus.host={self._learner_address}"]
        if kind_of(plan.name) == "learner":
            words += [f"weightbus.listen={self._bus_endpoint}"]
        ours = self._config.deploy.ray
        handed_on = {
            name: os.environ[name]  # noqa: TID251 handed on to roles
            for name in ours.environment
            if name in os.environ  # noqa: TID251
        }
        return StartRole(
            name=plan.name,
            command=tuple(words),
            settings=resolved_text(self._config),
            environment={**handed_on, **plan.environment},
            folder=self._folder,
            cores=plan.cores,
            key=key,
        )

    @property
    def _folder(self) -> str:
        """Working folder of roles; empty if Ray brings one."""
        return "" if self._config.deploy.ray.working_dir else str(Path.cwd())

    def _publish_from(self, host: _Host) -> None:
        """Publish the weights from this host, which has the learner's first rank."""
        if host.address == self._learner_address:
            return
        port = _port_of(self._config.learner.weightbus.listen) or self._free_port(host, 2)
        self._learner_address = host.address
        self._bus_endpoint = f"tcp://{Address(host.address, port)}"

    # ---- placing -----------------------------------------------------------------

    def _place_pools(self) -> None:
        for pool in self._pools:
            self._groups[pool.name] = self._group(pool)
        deadline = time.monotonic() + self._config.deploy.ray.start_timeout_s
        for pool in self._pools:
            while not self._groups[pool.name].wait(_LOG_EVERY_S):
                if time.monotonic() > deadline:
                    raise ConfigError(self._no_room(pool))
                self._console.print(f"waiting for the cluster: {pool.needs}; free: {_free()}")

    def _group(self, pool: Pool) -> PlacementGroup:
        group: PlacementGroup = placement_group(
            [dict(bundle) for bundle in pool.bundles],
            strategy=pool.strategy,
            name=f"{self._config.run.name}-{pool.name}-{secrets.token_hex(4)}",
            bundle_label_selector=[dict(labels) for labels in pool.labels],
        )
        return group

    def _no_room(self, pool: Pool) -> str:
        limit = self._config.deploy.ray.start_timeout_s
        return (
            f"the cluster has no room for the {pool.name} within {limit:g} s "
            f"(deploy.ray.start_timeout_s): {pool.needs}, free are {_free()}"
        )

    def _place(self, names: Sequence[str]) -> None:
        """Make a role host for each process, in its pool."""
        actors = {name: self._actor(name) for name in names}
        waiting = {name: actor.node.remote() for name, actor in actors.items()}
        deadline = time.monotonic() + self._config.deploy.ray.start_timeout_s
        marker = nearest_folder(self._config.run.folder) / f".seen-{secrets.token_hex(8)}"
        marker.write_text("")
        try:
            for name, answer in waiting.items():
                node = self._await_place(name, answer, deadline)
                self._hosts[name] = self._described(name, actors[name], node, marker)
        except BaseException:
            for name in waiting:
                if name not in self._hosts:
                    ray.kill(actors[name])
            raise
        finally:
            marker.unlink(missing_ok=True)

    def _actor(self, name: str) -> _Actor:
        pool, index = next(
            (pool, pool.members.index(name)) for pool in self._pools if name in pool.members
        )
        bundle = dict(pool.bundles[index])
        options: dict[str, Any] = {
            "num_cpus": bundle.pop("CPU", 0),
            "num_gpus": bundle.pop("GPU", 0),
            "resources": bundle,
            "max_restarts": 0,
            "max_concurrency": 8,
            "name": f"{self._config.run.name}-{name}-{secrets.token_hex(4)}",
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._groups[pool.name], placement_group_bundle_index=index
            ),
        }
        actor: _Actor = ray.remote(**options)(_RayRoleHost).remote()
        return actor

    def _await_place(self, name: str, answer: _Answer, deadline: float) -> str:
        while True:
            try:
                return str(ray.get(answer, timeout=_LOG_EVERY_S))
            except GetTimeoutError as error:
                if time.monotonic() > deadline:
                    raise ChildDiedError(
                        f"the cluster has no place for {name} within "
                        f"{self._config.deploy.ray.start_timeout_s:g} s "
                        f"(deploy.ray.start_timeout_s); free are {_free()}"
                    ) from error
                _log.info("waiting for the cluster to have a place for %s; free: %s", name, _free())
            except RayError as error:
                raise ConfigError(f"{name} cannot be placed: {_reason(error)}") from error

    def _described(self, name: str, actor: _Actor, node: str, marker: Path) -> _Host:
        address = next(row["NodeManagerAddress"] for row in _nodes() if row["NodeID"] == node)
        answer = actor.facts.remote(str(marker.absolute()))
        facts = msgspec.json.decode(_got(answer), type=HostFacts)
        if not facts.sees and kind_of(name) in {"broker", "learner"}:
            raise ConfigError(
                f"{facts.hostname} ({address}), the node of the {name}, does not see "
                f"{self._config.run.folder.absolute()} (run.dir): it must be on a file system that "
                "this host, the broker's and the learner's share"
            )
        return _Host(actor, node, address, facts)

    def _free_port(self, host: _Host, count: int) -> int:
        return int(_got(host.actor.free_port.remote(host.address, count)))

    def _key_of(self, plan: RolePlan) -> tuple[str, Role]:
        """Return name and role of a process's key: one key per host and role."""
        role = key_role(plan.name)
        name = f"{self._hosts[plan.name].address}.{role.replace('_', '-')}"
        return name.replace(":", "-"), role

    def _make_keys(self, names: Sequence[tuple[str, Role]]) -> None:
        folder = keys_folder(self._config.run, self._config.broker.broker).absolute()
        wanted = list(dict.fromkeys(names))
        answer = self._hosts["broker"].actor.make_keys.remote(str(folder), wanted)
        keys = msgspec.json.decode(_got(answer), type=list[ClientKey])
        self._keys |= {key.name: key for key in keys}


class RayStarter:
    """Starts roles on the nodes of a cluster."""

    def __init__(self, site: RaySite) -> None:
        self._site = site
        self.processes: dict[str, RayProcess] = {}  # newest process of each name

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
            self._site.rendezvous = Future()
        process = RayProcess(self._site, plan, arguments, log_file)
        self.processes[plan.name] = process
        return process

    def sweep(self, name: str) -> None:
        """Do nothing: the role host removes a dead role's files before the next start."""

    def give_back(self, name: str) -> None:
        """Free the place of a role that has ended."""
        self._site.give_back(name)

    def let_go(self) -> None:
        """Do nothing: role hosts end what outlives a role when they are closed."""


class RayProcess:
    """One process of a role on a node of the cluster, followed by a thread."""

    def __init__(
        self, site: RaySite, plan: RolePlan, arguments: Sequence[str], log_file: Path
    ) -> None:
        self.ended_because = ""
        self.lost = False  # True if its node, or the process that watched it, is gone
        self.sockets: tuple[str, ...] = ()
        self._site = site
        self._plan = plan
        self._arguments = arguments
        self._log_file = log_file
        self._rendezvous = site.rendezvous
        self._words = ""
        self._signs = Signs(0.0, 0, 0)
        self._code: int | None = None
        self._lock = threading.Lock()
        self._host: _Host | None = None  # set once it runs
        self._cancelled = 0  # signal that came before it ran
        threading.Thread(target=self._follow, name=plan.name, daemon=True).start()

    def poll(self) -> int | None:
        """Return the exit code; None while the process runs."""
        return self._code

    def send_signal(self, signum: int, /) -> None:
        """Send a signal; a process that is not placed yet is not started."""
        with self._lock:
            if self._code is not None:
                return
            if self._host is None:
                self._cancelled = signum
                self._code = -signum
            else:
                self._host.actor.signal.remote(int(signum))

    def signs(self) -> Signs:
        """Return the signs of life that the host saw last."""
        return self._signs

    def last_words(self) -> str:
        """Return the last line of the process; empty if unknown."""
        return self._words

    def release(self) -> None:
        """Do nothing: this host keeps nothing for the process."""

    def _follow(self) -> None:
        name = self._plan.name
        code = EXIT_FAILED
        try:
            code = self._run()
        except ConfigError as error:
            self._words, code = str(error), EXIT_BAD_SETTINGS
        except SlipstreamError as error:
            self.ended_because = str(error)
        except RayActorError:
            self.lost = True
            self.ended_because = self._site.forget(name)
        except RayError as error:
            self.ended_because = _reason(error)
            with suppress(OSError), self._log_file.open("a") as log:  # the whole traceback
                log.write(f"{name} is not followed any more: {_plain(error)}\n")
            self._end_unfollowed()
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
            with suppress(RayError):
                _got(self._host.actor.signal.remote(signal.SIGKILL))

    def _run(self) -> int:
        host = self._site.host_of(self._plan)
        request = self._site.request(self._plan, self._arguments, host, self._rendezvous)
        if cancelled := self._signal_before_start():
            return -cancelled
        pid = _got(host.actor.start.remote(msgspec.json.encode(request)))
        with self._lock:
            self._host = host
        if cancelled := self._signal_before_start():
            host.actor.signal.remote(signal.SIGKILL)
            return -cancelled
        _log.info("%s is process %d on %s", self._plan.name, pid, host.address)
        with self._log_file.open("ab") as log:
            while True:
                answer, text = self._observed(host)
                with suppress(OSError):  # disk full; the role's own log is on its host
                    log.write(text)
                    log.flush()
                host.log_offset += len(text)
                seen = msgspec.json.decode(answer, type=Observation)
                self._signs = Signs(seen.cpu_s, seen.page_ins, seen.log_bytes)
                self._words, self.sockets = seen.words, seen.sockets
                if seen.code is not None and not text:
                    return seen.code

    def _observed(self, host: _Host) -> tuple[bytes, bytes]:
        """Ask for the state; repeat while the host is unreachable but not given up."""
        is_logged = False
        while True:
            try:
                answer: tuple[bytes, bytes] = _got(
                    host.actor.observe.remote(host.log_offset, _OBSERVE_S)
                )
            except ActorUnavailableError:
                if not is_logged:
                    _log.warning("%s: its node %s cannot be reached", self._plan.name, host.address)
                is_logged = True
                time.sleep(_OBSERVE_S)
            else:
                return answer

    def _signal_before_start(self) -> int:
        """Return the signal sent before the process ran; 0 if there was no signal."""
        with self._lock:
            return self._cancelled


def _connect(config: RunConfig) -> None:
    ours = config.deploy.ray
    environment: dict[str, Any] = dict(ours.runtime_env)
    if ours.working_dir:
        environment["working_dir"] = ours.working_dir
    try:
        ray.init(
            address=ours.address,
            namespace=f"slipstream-{config.run.name}",
            runtime_env=environment or None,
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=False,
        )
    except (ConnectionError, ValueError, RuntimeError, RayError) as error:
        raise ConfigError(
            f"no Ray cluster answers at {ours.address} (deploy.ray.address): {_reason(error)}"
        ) from error
    if ours.require_token:
        head = str(ray.get_runtime_context().gcs_address)
        try:
            require_token(head, ours.start_timeout_s)
        except BaseException:
            ray.shutdown()
            raise


def _got(answer: _Answer) -> Any:  # noqa: ANN401 whatever the method returns
    """Return the answer of a role host; wait as long as the cluster has its node.

    Raises:
        RayActorError: its node is gone, it ended, or it cannot be reached; the method may have run.
        RayTaskError: the method raised a foreign error; our own errors are raised as they are.
    """
    while True:
        try:
            return ray.get(answer, timeout=_ANSWER_S)
        except RayTaskError as error:
            if isinstance(error.cause, SlipstreamError):
                raise error.cause from error
            raise
        except GetTimeoutError:
            _log.warning("a node of the cluster has not answered for %g s", _ANSWER_S)


def _nodes() -> list[dict[str, Any]]:
    return list(ray.nodes())


def _num_gpus() -> float:
    resources: dict[str, float] = ray.cluster_resources()
    return resources.get("GPU", 0.0)


def _free() -> str:
    kinds = {
        name: count
        for name, count in ray.available_resources().items()
        if not name.startswith(("node:", "bundle_group", "memory", "object_store"))
        and "_group_" not in name
    }
    return ", ".join(f"{name} {count:g}" for name, count in sorted(kinds.items())) or "nothing"


def _port_of(endpoint: str) -> int:
    """Return the port of tcp://ADDRESS:PORT; 0 for an empty endpoint."""
    return int(endpoint.rpartition(":")[2]) if endpoint else 0


def _reason(error: BaseException) -> str:
    """Return an error in one line; the last line of Ray's own, which begin with tracebacks."""
    cause = error.cause if isinstance(error, RayTaskError) else None
    if isinstance(cause, BaseException) and not isinstance(cause, RayError):
        lines = f"{type(cause).__name__}: {cause}".splitlines()[:1]
    else:
        lines = [line.strip() for line in _plain(error).splitlines() if line.strip()]
    at = -1 if isinstance(error, RayError) else 0
    return lines[at] if lines else type(error).__name__


def _plain(error: BaseException) -> str:
    """Return the text of an error without Ray's colors."""
    return re.sub(r"\x1b\[[0-9;]*m", "", str(error))
