"""`slipstream run --on ray`: Ray places, starts and watches the roles of a run on a cluster.

The supervisor's rules hold: Ray restarts nothing. Data travel over ZeroMQ, NCCL and Redis.
"""

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
from rich.console import Console

from slipstream.broker.config import keys_folder
from slipstream.deploy.config import RunConfig, nearest_folder, resolved_text, write_resolved
from slipstream.deploy.launch.cluster import ray_calls
from slipstream.deploy.launch.cluster.host_program import Post
from slipstream.deploy.launch.cluster.pools import Pool, pool_of, pools_of
from slipstream.deploy.launch.cluster.ray_calls import HostCallError, result_of
from slipstream.deploy.launch.cluster.ray_process import PlacedHost, RayProcess
from slipstream.deploy.launch.cluster.role_host import PYTHON, SETTINGS, HostFacts, StartRole
from slipstream.deploy.launch.plan import RolePlan, key_role, kind_of, plan_generator, plan_roles
from slipstream.deploy.launch.session import SessionView, run_in_folder
from slipstream.wire.errors import ChildDiedError, ConfigError
from slipstream.wire.files.keys import ClientKey, write_client_key
from slipstream.wire.files.run_folder import SETTINGS as SETTINGS_FILE
from slipstream.wire.messages.broker import Role
from slipstream.wire.settings.rendezvous import Address

_log = logging.getLogger(__name__)
_LOG_EVERY_S = 10.0
_OBSERVER = "run-observer"


def run_on_ray(config: RunConfig, view: SessionView) -> int:
    """Run to the end on a Ray cluster; returns the exit code.

    Raises:
        ConfigError: no such cluster exists, or it cannot run this.
    """
    site = RaySite(RayPlaces.connected(config, view.console))
    return run_in_folder(config.run, lambda: site, view)


@contextmanager
def ray_posts(
    config: RunConfig, console: Console, module: str
) -> Iterator[tuple[RunConfig, list[Post]]]:
    """Yield the run with its hosts' addresses, and a post for each planned process.

    The program of a module looks at each host, until the block ends.

    Raises:
        ConfigError: no such cluster exists, it has no room, or its nodes cannot run this.
    """
    places = RayPlaces.connected(config, console)
    try:
        places.place_all()
        posts = [
            Post(name, host.node, host.address, partial(host.look, module, places.folder))
            for name, host in places.hosts.items()
        ]
        yield _addressed(places.config, places.hosts), posts
    finally:
        places.close()


def _addressed(config: RunConfig, hosts: dict[str, PlacedHost]) -> RunConfig:
    """Return the run with the addresses of its placed hosts; unset ports stay open."""
    bus, address = config.learner.weightbus, hosts["learner"].address
    broker = Address(hosts["broker"].address, _port_of(config.broker.broker.listen))
    return config.with_settings("broker", listen=f"tcp://{broker}").with_settings(
        "weightbus",
        listen=f"tcp://{Address(address, _port_of(bus.listen))}",
        host=address if config.deploy.ray.collectives else bus.host,
    )


class RayPlaces:
    """Places of a run on a cluster: a group of them per pool, a role host for each process."""

    def __init__(self, config: RunConfig, console: Console, *, has_gpus: bool) -> None:
        if not config.broker.broker.keys:  # keys of one run: each run makes its own
            keys = str(config.run.folder.absolute() / "keys")
            config = config.with_settings("broker", keys=keys)
        self.config = config
        self.console = console
        self.hosts: dict[str, PlacedHost] = {}  # process -> host
        # working folder of roles; empty if Ray brings one
        self.folder = "" if "working_dir" in config.deploy.ray.runtime_env else str(Path.cwd())
        self._uses_gpus = has_gpus and config.generators.generators.device != "cpu"
        self._limit_s = config.deploy.ray.start_timeout_s
        self._groups: list[tuple[Pool, ray_calls.Group]] = []
        self._placing: dict[str, threading.Lock] = {}  # name -> lock: a place holds one host

    @classmethod
    def connected(cls, config: RunConfig, console: Console) -> "RayPlaces":
        """Connect to the cluster, or raise ConfigError; place nothing yet."""
        has_gpus = ray_calls.connect(config.deploy.ray, config.run.name)
        return cls(config, console, has_gpus=has_gpus)

    def place_all(self) -> list[RolePlan]:
        """Place the planned processes, check their hosts; return the plans.

        Raises:
            ConfigError: the cluster has no room, or its nodes cannot run this.
        """
        plans = plan_roles(self.config, Path(SETTINGS), gpus=None, python=PYTHON)
        for pool in pools_of(self.config, uses_gpus=self._uses_gpus):
            self._add_pool(pool)
        deadline = time.monotonic() + self._limit_s
        for pool, group in self._groups:
            while not group.wait(_LOG_EVERY_S):
                free = ray_calls.free_resources()
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"the cluster has no room for the {pool.name} within {self._limit_s:g} s "
                        f"(deploy.ray.start_timeout_s): {pool.needs}, free are {free}"
                    )
                self.console.print(f"waiting for the cluster: {pool.needs}; free: {free}")
        self._place([plan.name for plan in plans])
        return plans

    def generator(self, name: str) -> RolePlan:
        """Return an additional generator, and ask the cluster for its place."""
        if not any(name in pool.members for pool, _ in self._groups):
            self._add_pool(pool_of(self.config, name, [name], uses_gpus=self._uses_gpus))
        return plan_generator(self.config, Path(SETTINGS), name, gpus=None, python=PYTHON)

    def host_of(self, plan: RolePlan, is_wanted: Callable[[], bool]) -> PlacedHost | None:
        """Return the host of a role, as Placement says."""
        # The host of a process that was ended while it was placed is that of the next one.
        with self._placing.setdefault(plan.name, threading.Lock()):
            if plan.name not in self.hosts and is_wanted():
                self._place([plan.name])
            return self.hosts.get(plan.name)

    def forget(self, name: str, host: PlacedHost | None) -> str:
        """Give up a host, as Placement says."""
        if host is None:
            return "its node left the cluster as it was to be started"
        if self.hosts.get(name) is host:  # else a later process of this name has another
            del self.hosts[name]
        has_node = ray_calls.is_alive(host.node)
        ray_calls.kill(host.actor)
        if not has_node:
            return f"its node {host.where} left the cluster"
        return f"the process that watched it on {host.where} ended"

    def give_back(self, name: str) -> None:
        """Free the place of a process that will not restart; its host ends in the background."""
        host = self.hosts.pop(name, None)
        own = [pair for pair in self._groups if pair[0].members == (name,)]
        self._groups = [pair for pair in self._groups if pair not in own]
        actors, groups = [host.actor] if host is not None else [], [group for _, group in own]
        threading.Thread(
            target=ray_calls.end_hosts, args=(actors, groups), name=f"end of {name}", daemon=True
        ).start()

    def close(self) -> None:
        """End every role host, give the nodes back, and leave the cluster."""
        actors = [host.actor for host in self.hosts.values()]
        ray_calls.end_hosts(actors, [group for _, group in self._groups])
        ray_calls.disconnect()

    def _add_pool(self, pool: Pool) -> None:
        self._groups.append((pool, ray_calls.new_group(pool, self._unique(pool.name))))

    def _unique(self, name: str) -> str:
        return f"{self.config.run.name}-{name}-{secrets.token_hex(4)}"

    def _place(self, names: Sequence[str]) -> None:
        """Make a role host for each process, in its pool."""
        actors: dict[str, ray_calls.Actor] = {}
        for name in names:
            pool, group = next(pair for pair in self._groups if name in pair[0].members)
            actors[name] = ray_calls.new_host(pool, group, name, self._unique(name))
        deadline = time.monotonic() + self._limit_s
        marker = nearest_folder(self.config.run.folder) / f".seen-{secrets.token_hex(8)}"
        marker.write_text("")
        try:
            calls = {name: actors[name].facts.remote(str(marker)) for name in names}
            for name, call in calls.items():
                self.hosts[name] = self._await_place(name, actors[name], call, deadline)
        except BaseException:
            for name, actor in actors.items():
                if name not in self.hosts:
                    ray_calls.kill(actor)
            raise
        finally:
            marker.unlink(missing_ok=True)

    def _await_place(
        self, name: str, actor: ray_calls.Actor, call: ray_calls.CallResult, deadline: float
    ) -> PlacedHost:
        def note_wait() -> None:
            free = ray_calls.free_resources()
            if time.monotonic() > deadline:
                raise ChildDiedError(
                    f"the cluster has no place for {name} within {self._limit_s:g} s "
                    f"(deploy.ray.start_timeout_s); free are {free}"
                )
            _log.info("waiting for the cluster to have a place for %s; free: %s", name, free)

        try:
            answer = result_of(call, every_s=_LOG_EVERY_S, on_silence=note_wait)
        except HostCallError as error:
            raise ConfigError(f"{name} cannot be placed: {error}") from error
        facts = msgspec.json.decode(answer, type=HostFacts)
        address = ray_calls.address_of(facts.node)
        host = PlacedHost(actor, facts.node, address, facts.hostname, facts.niceness)
        if not facts.sees and kind_of(name) in {"broker", "learner"}:
            raise ConfigError(
                f"{host.where}, the node of the {name}, does not see "
                f"{self.config.run.folder.absolute()} (run.dir): it must be on a file system that "
                "this host, the broker's and the learner's share"
            )
        return host


class RaySite:
    """A run on a Ray cluster: where its processes meet, and the keys that they prove."""

    def __init__(self, places: RayPlaces) -> None:
        self.config = config = places.config
        self.run = config.run
        self.host_of, self.forget = places.host_of, places.forget
        self.generator, self.give_back = places.generator, places.give_back
        self.close = places.close
        self._places = places
        self._processes: dict[str, RayProcess] = {}  # newest process of each name
        self._key_folder = keys_folder(config.run, config.broker.broker)
        self._keys: dict[str, ClientKey] = {}  # name -> key
        self._rendezvous: Future[str] = Future()  # address of the learner's nodes
        self._learner_address = ""
        self._broker_endpoint = ""
        self._bus_endpoint = ""
        self._lock = threading.Lock()

    def plans(self) -> list[RolePlan]:
        """Place every role, check the hosts, make the keys; return the processes.

        Raises:
            ConfigError: the cluster has no room, or its nodes cannot run this.
        """
        config, hosts = self.config, self._places.hosts
        plans = self._places.place_all()
        broker = hosts["broker"]
        port = _port_of(config.broker.broker.listen) or broker.free_port(1)
        self._broker_endpoint = f"tcp://{Address(broker.address, port)}"
        self._publish_from(hosts["learner"])
        for plan in plans[1:]:  # before the broker reads them: it refuses a key that it lacks
            self._key_of(plan)
        key_file = config.run.folder / f"{_OBSERVER}.key"
        write_client_key(key_file, self._key(_OBSERVER, "observer"))
        watched = config.with_settings("run", broker=self._broker_endpoint, key_file=str(key_file))
        write_resolved(watched, config.run.folder / SETTINGS_FILE)
        self.run = watched.run
        for name, host in hosts.items():
            self._places.console.print(f"{name} is on {host.where}")
        if (niceness := max(host.niceness for host in hosts.values())) > 0:
            _log.warning(
                "the roles yield to other processes of their nodes (niceness %d): start Ray with "
                "RAY_worker_niceness=0",
                niceness,
            )
        return plans

    def start(self, plan: RolePlan, arguments: Sequence[str], log_file: Path) -> RayProcess:
        """Start a role; its process is placed in the background.

        Raises:
            ChildDiedError: the role cannot restart, because its node is gone.
        """
        before = self._processes.get(plan.name)
        if plan.serves_others and before is not None and before.lost:
            raise ChildDiedError(
                f"{plan.name} cannot be started again: {before.ended_because}. Its store is there: "
                "bring the node back, then --resume auto"
            )
        if plan.part_of and plan.name == "learner":  # the other nodes start after it
            self._rendezvous = Future()
        process = RayProcess(self, plan, arguments, log_file, self._rendezvous)
        self._processes[plan.name] = process
        threading.Thread(target=process.follow, name=plan.name, daemon=True).start()
        return process

    def broker_listens(self) -> bool:
        """True once the broker's socket is there."""
        process = self._processes.get("broker")
        return process is not None and "broker.sock" in process.sockets

    def where_to_connect(self) -> str:
        """Return a line on how others reach the run."""
        return f"the broker listens on {self._broker_endpoint}, with keys in {self._key_folder}"

    def request(
        self, plan: RolePlan, arguments: Sequence[str], host: PlacedHost, rendezvous: "Future[str]"
    ) -> StartRole:
        """Return the request to start a role, as Placement says."""
        ray, kind = self.config.deploy.ray, kind_of(plan.name)
        words = [*plan.command, *arguments]
        if plan.part_of:
            if plan.name == "learner":
                rendezvous.set_result(str(Address(host.address, host.free_port(1))))
            words += ["--rendezvous", rendezvous.result(ray.start_timeout_s)]
        where = "broker.listen" if kind == "broker" else "run.broker"
        words.append(f"{where}={self._broker_endpoint}")
        with self._lock:
            if plan.name == "learner":
                self._publish_from(host)
            key = self._key_of(plan) if kind != "broker" else None
        if ray.collectives and kind in {"learner", "generator"}:
            words.append(f"weightbus.host={self._learner_address}")
        if kind == "learner":
            words.append(f"weightbus.listen={self._bus_endpoint}")
        ours = os.environ  # noqa: TID251 handed on to roles
        handed_on = {name: ours[name] for name in ray.environment if name in ours}
        environment = {**handed_on, **plan.environment}
        return StartRole(
            plan=replace(plan, command=tuple(words), environment=environment),
            settings=resolved_text(self.config),
            folder=self._places.folder,
            key=key,
        )

    def _publish_from(self, host: PlacedHost) -> None:
        """Publish the weights from this host, which has the learner's first rank."""
        if host.address == self._learner_address:
            return
        port = _port_of(self.config.learner.weightbus.listen) or host.free_port(2)
        self._learner_address = host.address
        self._bus_endpoint = f"tcp://{Address(host.address, port)}"

    def _key_of(self, plan: RolePlan) -> ClientKey:
        """Return the key of a process: one per host and role."""
        role = key_role(plan.name)
        return self._key(f"{self._places.hosts[plan.name].address}.{role}", role)

    def _key(self, name: str, role: Role) -> ClientKey:
        """Return the key of this name, which is made the first time."""
        name = name.replace("_", "-").replace(":", "-")
        if name not in self._keys:
            folder = str(self._key_folder.absolute())
            try:
                broker = self._places.hosts["broker"].actor
                made = result_of(broker.make_key.remote(folder, name, role))
            except (KeyError, HostCallError) as error:
                raise ChildDiedError(f"the broker's host makes no key: {error}") from error
            self._keys[name] = msgspec.json.decode(made, type=ClientKey)
        return self._keys[name]


def _port_of(endpoint: str) -> int:
    """Return the port of tcp://ADDRESS:PORT; 0 for an empty endpoint."""
    return int(endpoint.rpartition(":")[2]) if endpoint else 0
