"""Builds the learner's ranks and runs them. Import it only after ``device.prepare()``."""

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # not in torch's stubs

from slipstream.learner.batches.broker_link import LeaderLink
from slipstream.learner.batches.links import LeadingLink, RankLink
from slipstream.learner.batches.payload_link import PayloadLink
from slipstream.learner.batches.prefetch import EarlyPlans
from slipstream.learner.batches.replay_link import ReplayLink
from slipstream.learner.checkpoints.resume import fetch_newer
from slipstream.learner.collective_errors import is_of_collective
from slipstream.learner.commands.loop import run_commands
from slipstream.learner.config import LearnerSettings
from slipstream.learner.coordinator import Coordinator
from slipstream.learner.layout import Place
from slipstream.learner.loop import LearnerLoop
from slipstream.learner.model import device
from slipstream.learner.model.collectives import any_rank
from slipstream.learner.model.cuda_attention import choose_attention
from slipstream.learner.model.division import refuse_policy
from slipstream.learner.model.topology import Topology, destroy_topology, init_topology
from slipstream.learner.nodes.card import facts_of
from slipstream.learner.nodes.watch import EXIT_COLLECTIVE, NodeWatch
from slipstream.learner.pool.tenant_loops import TenantLoop, TenantLoops
from slipstream.learner.publish.head_door import HeadDoor
from slipstream.learner.publish.part_link import PartLink
from slipstream.learner.publish.relay_process import RelayLaunch
from slipstream.learner.starting_policy import FrozenBase, start_policy
from slipstream.learner.stop import StopRequest
from slipstream.learner.training.algorithm import algorithm_of
from slipstream.weightbus.net.interfaces import address_towards, interface_variables
from slipstream.weightbus.net.rendezvous import open_store, store_on
from slipstream.wire.errors import ChildDiedError, ConfigError, SlipstreamError, text_of
from slipstream.wire.files.tenant_end import forget_tenant_end, write_tenant_end
from slipstream.wire.models.hf_config import load_hf_config
from slipstream.wire.process.background import BackgroundLoop
from slipstream.wire.process.health import Health
from slipstream.wire.process.logs import logging_for
from slipstream.wire.process.phases import PhaseClock
from slipstream.wire.process.processes import bound_to_me
from slipstream.wire.process.stopping import STOP_SIGNALS
from slipstream.wire.settings.rendezvous import Address
from slipstream.wire.settings.tenants import Tenant

_log = logging.getLogger(__name__)
_HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Launch:
    """Details of this start of a learner, apart from its settings."""

    replay: Path | None = None  # trajectory file to train on in place of a broker's batches
    resumes: bool = False  # resume from the run's newest usable checkpoint
    begun_after: int | None = None  # newest epoch of a checkpoint when the run was started
    relay: RelayLaunch = field(default_factory=RelayLaunch)
    health: Health = field(default_factory=Health)
    tenants: tuple[Tenant[LearnerSettings], ...] = ()  # runs to train in turns, in place of one
    serves: bool = False  # carry out commands of tenants in place of training a run


def run_learner(
    settings: LearnerSettings,
    place: Place,
    argv: Sequence[str],
    *,
    launch: Launch,
    stop: StopRequest,
) -> None:
    """Run the node's first rank here, and its other ranks in children with the same command line.

    Raises:
        ConfigError: the settings name no algorithm that this run can train, or the nodes differ.
        ChildDiedError: a rank of this node ended early.
        PeerLostError: another node ended early, or did not come.
    """
    hf = load_hf_config(settings.model)
    for run in [tenant.settings for tenant in launch.tenants] or [settings]:
        refuse_policy(hf, run)
        if launch.resumes and place.node == 0:
            fetch_newer(run)
        teaches = algorithm_of(run).choice.learns_from_equal_rewards
        if teaches and run.drops_equal_rewards and launch.replay is None:
            _log.warning(
                "groups of equal rewards teach this algorithm as well (algo.advantage, "
                "algo.teacher, algo.likelihood), and broker.drop_zero_variance = true replaces "
                "them: set it to false (%s)",
                run.run.folder,
            )
    node = _Node(settings, place, launch, stop, argv)
    if place.layout.ranks == 1:
        node.run_rank(0, HashStore(), None)
    elif place.address is not None:
        _run_with_others(node, place.address)
    else:
        timeout_s = settings.learner.timeout_s
        store = open_store(_HOST, world_size=place.layout.ranks, timeout_s=timeout_s)
        node.run(Address(_HOST, store.port), store)


@dataclass(frozen=True, slots=True)
class _Node:
    """The ranks of one node."""

    settings: LearnerSettings
    place: Place
    launch: Launch
    stop: StopRequest
    argv: Sequence[str] = ()  # command line of the ranks that the first one starts

    def run(self, address: Address, store: Store, watch: NodeWatch | None = None) -> None:
        """Run all ranks, which meet in the store at ``address``, until they end.

        Raises:
            ChildDiedError: a rank ended early.
        """
        first, *others = self.place.ranks
        children = {rank: _start_rank(self.argv, rank, address.port) for rank in others}
        if watch is not None:
            watch.ranks_here(children)
        try:
            self.run_rank(first, store, address)
            for rank, child in children.items():
                try:
                    code = child.wait(self.settings.learner.timeout_s)
                except subprocess.TimeoutExpired as error:
                    raise ChildDiedError(f"learner rank {rank} did not end") from error
                if code != 0:
                    raise ChildDiedError(f"learner rank {rank} ended with code {code}")
        except RuntimeError as error:
            if watch is not None:
                raise
            dead = [r for r, child in children.items() if child.poll() not in {None, 0}]
            raise ChildDiedError(f"learner ranks {dead} ended; {error}") from error
        finally:
            if watch is not None:  # ranks killed below are not the reason
                watch.ranks_here({r: c for r, c in children.items() if c.poll() is not None})
            for child in children.values():
                if child.poll() is None:
                    child.kill()
                child.wait()

    def run_rank(self, rank: int, store: Store, address: Address | None) -> None:
        """Build the policy on a rank and train.

        The ranks meet in ``store``, whose server is at ``address``; None for a single rank.
        """
        learner, place = self.settings.learner, self.place
        _take_interface(place.address.host if place.address is not None else _HOST)
        device.set_threads(learner.threads)
        if learner.deterministic:
            device.set_deterministic()
        topology = init_topology(
            rank=rank,
            ranks_per_node=place.layout.ranks_per_node,
            world_size=learner.ranks,
            sizes=learner.sizes,
            store=store,
            seed=self.settings.run.seed,
            timeout_s=learner.timeout_s,
            has_experts=load_hf_config(self.settings.model).num_routed_experts > 0,
        )
        try:
            early = _join_store(self.settings, address) if address is not None else None
            self._train(topology, early)
        finally:
            destroy_topology()

    def _train(self, topology: Topology, early: Store | None) -> None:
        tenants, health = self.launch.tenants, self.launch.health
        if self.launch.serves:
            with self.stop.deferred(), health.ending():
                run_commands(self.settings, topology, self.stop, health)
            return
        runs = [tenant.settings for tenant in tenants] or [self.settings]
        saves = any(run.checkpoint.on_stop for run in runs)
        with ExitStack() as cleanup:
            work: Callable[[Health], None]
            if tenants:
                work = self._tenants(topology, early, cleanup).run
            else:
                work = self._begin(topology, early, cleanup).loop.run
            with self.stop.deferred(when=saves or self.place.node > 0), health.ending():
                work(health)

    def _tenants(self, topology: Topology, early: Store | None, cleanup: ExitStack) -> TenantLoops:
        """Begin every tenant's run that can be begun; the others end alone.

        Raises:
            ConfigError: the model cannot be loaded.
        """
        base = FrozenBase.load(self.settings, topology)
        found: list[TenantLoop] = []
        for tenant in self.launch.tenants:
            one = replace(self, settings=tenant.settings)
            own = cleanup.enter_context(ExitStack())
            if topology.rank == 0:
                forget_tenant_end(tenant.settings.run.folder)
            begun, reason = None, ""
            with logging_for(tenant.name):
                try:
                    begun = one._begin(topology, early, own, base=base, tenant=tenant)
                except SlipstreamError as error:
                    reason = text_of(error)
                    _log.error("this tenant does not begin: %s", error)
            fails = any_rank(begun is None)
            if begun is not None and not fails:
                found.append(begun)
                continue
            own.close()
            if topology.rank == 0:
                reason = reason or "another rank of the learner cannot begin it: see its log"
                folder = tenant.settings.run.folder
                write_tenant_end(folder, f"the learner gave it up: {reason}")
        wait_s = self.settings.learner.timeout_s / 4
        return TenantLoops(found, self.stop, rank=topology.rank, wait_s=wait_s)

    def _begin(
        self,
        topology: Topology,
        early: Store | None,
        cleanup: ExitStack,
        *,
        base: FrozenBase | None = None,
        tenant: Tenant[LearnerSettings] | None = None,
    ) -> TenantLoop:
        """Load the policy of a run, connect to its broker, and prepare its loop.

        The only run of a learner is a tenant alone.
        """
        launch, algorithm = self.launch, algorithm_of(self.settings)
        settings, policy = start_policy(
            self.settings,
            algorithm,
            topology,
            resumes=launch.resumes,
            begun_after=launch.begun_after,
            base=base,
        )
        hf, dtype = policy.model.hf_config, policy.model.config.params_dtype
        _log.info("attention: %s", choose_attention(hf, device.device(), dtype))
        node, clock = replace(self, settings=settings), PhaseClock()
        name = tenant.name if tenant is not None else ""
        plans = EarlyPlans(PrefixStore(name, early)) if early is not None else None
        door = node._head_door(topology)
        link, leader = cleanup.enter_context(
            node._open_link(topology, plans, clock, door, tenant=name)
        )
        part = cleanup.enter_context(node._open_part(topology, door))
        loop = LearnerLoop(
            settings,
            topology,
            policy,
            algorithm,
            link,
            Coordinator(leader, self.stop, shares_failures=tenant is not None),
            clock,
            part=part,
            is_replay=launch.replay is not None,
        )
        return TenantLoop(
            name=name,
            weight=tenant.weight if tenant is not None else 1.0,
            folder=settings.run.folder,
            policy=policy,
            loop=loop,
            clock=clock,
            leader=leader if isinstance(leader, LeaderLink) else None,
            cleanup=cleanup,
        )

    @property
    def _keeps_parts(self) -> bool:
        """True if each of several hosts keeps and serves the tensors that it writes."""
        settings = self.settings
        is_shared = settings.weightbus.parts == "auto" and not settings.lora.is_named
        return self.place.layout.nodes > 1 and is_shared

    def _relay_launch(self, tenant: str = "") -> RelayLaunch:
        """Return how to start this host's relay: as the head on node 0, as a part on other hosts.

        A relay serves one run: that of the learner, or of a tenant.

        A relay listens for engines at the address that leads to node 0, or at weightbus.listen if
        that is an address of this host.

        Raises:
            ConfigError: the address towards node 0 is not IPv4.
        """
        place, launch = self.place, self.launch.relay
        if tenant:
            launch = replace(launch, settings=(*launch.settings, "--tenant", tenant))
        if place.address is None or not self._keeps_parts:
            return launch
        own, listen = address_towards(place.address.host), self.settings.weightbus.listen
        is_own = bool(own) and f"//{own}:" in listen
        if not is_own and (place.node > 0 or not listen):
            if "." not in own:
                raise ConfigError(
                    f"node {place.node} reaches node 0 ({place.address}) from "
                    f"{own or 'no address'}, and its relay listens at an IPv4 address: set "
                    'weightbus.listen to one, or weightbus.parts = "off"'
                )
            listen = f"tcp://{own}:0"
        words = (*launch.settings, f"weightbus.listen={listen}")
        return replace(launch, settings=words, part=place.node, parts=place.layout.nodes)

    def _head_door(self, topology: Topology) -> HeadDoor | None:
        """Return where the first ranks of several hosts learn the head relay's address."""
        is_first = topology.rank == self.place.ranks[0]
        if self.place.address is None or not is_first or not self._keeps_parts:
            return None
        return HeadDoor(_join_store(self.settings, self.place.address))

    @contextmanager
    def _open_part(self, topology: Topology, door: HeadDoor | None) -> Iterator[PartLink | None]:
        """Open the part relay on each host's first rank, except rank 0, which has the head."""
        if door is None or topology.rank == 0 or self.launch.replay is not None:
            yield None
            return
        with BackgroundLoop() as loop:
            part = PartLink(loop, self.settings.run, self._relay_launch(), door)
            try:
                yield part
            except SystemExit:  # stopped at once
                part.end()
                raise

    @contextmanager
    def _open_link(
        self,
        topology: Topology,
        early: EarlyPlans | None,
        clock: PhaseClock,
        door: HeadDoor | None,
        *,
        tenant: str,
    ) -> Iterator[tuple[RankLink | None, LeadingLink | None]]:
        """Open the link of a rank that fetches payloads; on rank 0 it is the leading link too."""
        settings = self.settings
        if not topology.leads_replica:
            yield None, None
            return
        if self.launch.replay is not None:
            file = ReplayLink(self.launch.replay, settings)
            yield file, file if topology.rank == 0 else None
            return
        with BackgroundLoop() as loop:
            link: PayloadLink
            leader: LeaderLink | None = None
            if topology.rank == 0:
                link = leader = LeaderLink(
                    loop,
                    settings,
                    clock,
                    lambda: self.stop.requested,
                    relay=self._relay_launch(tenant),
                    early=early if topology.data_parallel > 1 else None,
                    on_door=door.post if door is not None else None,
                )
            else:
                name, replica = f"learner-rank-{topology.rank}", topology.data_parallel_rank
                link = PayloadLink(loop, settings, name, replica=replica, early=early)
            try:
                yield link, leader
            except SystemExit:  # stopped at once
                if leader is not None:
                    leader.end()
                raise
            finally:
                link.close()


def _run_with_others(node: _Node, address: Address) -> None:
    """Meet the other nodes, then run this node's ranks as long as all nodes run theirs."""
    settings, launch = node.settings, node.launch
    _take_interface(address.host)
    facts = facts_of(
        settings, replays=launch.replay is not None, resumes=launch.resumes, device=device.backend()
    )
    with NodeWatch(settings, node.place, facts, node.stop) as watch:
        met, listener = watch.meet()
        if listener is None:
            store = _join_store(settings, met)
        else:
            ranks, timeout_s = settings.learner.ranks, settings.learner.timeout_s
            store = store_on(listener, met.host, world_size=ranks, timeout_s=timeout_s)
        placed = replace(node, place=replace(node.place, address=met))
        placed.run(met, store, watch)
    del store  # kept until here: all nodes meet in it


def join_ranks(
    settings: LearnerSettings, place: Place, *, rank: int, port: int, launch: Launch
) -> int:
    """Run one of a node's other ranks, in a process started by the node's first rank.

    Returns:
        The rank's exit code, which shows the first rank of its node if another rank is the reason.
    """
    address = Address(place.address.host if place.address is not None else _HOST, port)
    if place.address is not None:
        place = replace(place, address=address)
    try:
        node = _Node(settings, place, launch, StopRequest())
        node.run_rank(rank, _join_store(settings, address), address)
    except RuntimeError as error:
        if place.address is None or not is_of_collective(error):
            raise
        _log.warning("another rank is gone: %s", text_of(error))
        return EXIT_COLLECTIVE
    return 0


def _join_store(settings: LearnerSettings, address: Address) -> TCPStore:
    timeout = timedelta(seconds=settings.learner.timeout_s)
    return TCPStore(address.host, address.port, is_master=False, timeout=timeout)


def _take_interface(host: str) -> None:
    """Have gloo and NCCL use the interface towards a host, unless the user chose one."""
    os.environ.update(interface_variables(host, os.environ))  # noqa: TID251 gloo and NCCL have no setting


def _start_rank(argv: Sequence[str], rank: int, port: int) -> "subprocess.Popen[bytes]":
    die_with_me = bound_to_me()

    def prepare() -> None:
        die_with_me()
        for signum in STOP_SIGNALS:  # rank 0 alone decides when to end
            signal.signal(signum, signal.SIG_IGN)

    program = [sys.executable, "-m", "slipstream.learner.main"]
    own = ["--rank", str(rank), "--port", str(port)]
    return subprocess.Popen([*program, *argv, *own], preexec_fn=prepare)  # noqa: S603 our own program
