"""An engine whose ranks are on two "hosts", which reach each other over loopback; real SGLang."""

import asyncio
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file
from torch import Tensor

from slipstream.generators.config import GeneratorSettings, generator_settings
from slipstream.generators.engine import SamplingParams
from slipstream.generators.nodes.leader import EngineLeader, leading_engine
from slipstream.generators.nodes.membership import place_of
from slipstream.generators.sglang.engine import SglangEngine
from slipstream.generators.sglang.process import SglangProcess
from slipstream.generators.sglang.running import running_engine, watch_all
from slipstream.weightbus.agent.staging import Staging
from slipstream.weightbus.agent.subscriber import Subscriber
from slipstream.weightbus.agent.tensor_set import model_tensors
from slipstream.weightbus.version.engine_checksums import (
    EngineLayout,
    differing,
    expected_checksums,
)
from slipstream.wire.errors import EngineError, PeerLostError
from slipstream.wire.files.keys import write_client_key
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.process.health import Health
from slipstream.wire.settings.load import load_table
from tests.support.bus.published import subscriber_of
from tests.support.bus.remote import EPOCH, Relay, adopts, client_key, free_ports, running
from tests.support.listening import listeners_of
from tests.support.processes import shared_memory_of, tree_of
from tests.support.tiny_run import ROOT, write_policy
from tests.support.waiting import HANG_S, until, until_async

pytestmark = pytest.mark.integration
NAME = "generator-0"
KEY = client_key("gpu-7")


class Hosts:
    """A folder with the settings and the keys of an engine, and followers that are processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rendezvous = free_ports().removeprefix("tcp://")
        self._processes: list[subprocess.Popen[bytes]] = []
        write_policy(folder / "model")
        for name, key in (("ours", KEY), ("other", client_key("gpu-8"))):
            write_client_key(folder / f"{name}.key", key)
        (folder / "run.toml").write_text(
            f"""
            [run]
            name = "p"
            dir = "{folder}/runs"
            socket_dir = "{folder}/sockets"
            model = "{folder}/model"
            broker = "tcp://127.0.0.1:1"
            key_file = "{folder}/ours.key"
            [sampling]
            max_prompt_tokens = 16
            max_response_tokens = 64
            top_k = 8
            [generators]
            device = "cpu"
            nodes = 2
            max_cached_tokens = 4096
            node_silence_s = {HANG_S}
            [generators.sglang]
            tp_size = 2
            """
        )

    def settings(self, *overrides: str) -> GeneratorSettings:
        return generator_settings(load_table(self.folder / "run.toml", list(overrides)))

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        return load_file(self.folder / "model" / "model.safetensors")

    def start(self, *words: str) -> "subprocess.Popen[bytes]":
        """Start node 0, or another; its output is in N.log."""
        with self.log(len(self._processes)).open("wb") as log:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "slipstream.generators.main"),
                    *("--config", self.folder / "run.toml", "--name", NAME),
                    *("--rendezvous", self.rendezvous, *words),
                ],
                cwd=ROOT,
                stdout=log,
                stderr=log,
            )
        self._processes.append(process)
        return process

    def follow(self, *overrides: str) -> "subprocess.Popen[bytes]":
        return self.start("--follow", "1", *overrides)

    def log(self, number: int) -> Path:
        return self.folder / f"{number}.log"

    def end(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()

    @asynccontextmanager
    async def leader(
        self, *overrides: str, stop: asyncio.Event | None = None
    ) -> AsyncIterator[EngineLeader]:
        settings = self.settings(*overrides)
        place = place_of(settings, None, self.rendezvous)
        async with leading_engine(
            settings, NAME, place, stop or asyncio.Event(), Health()
        ) as leader:
            assert leader is not None
            yield leader


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with tempfile.TemporaryDirectory(prefix="sp-", dir="/tmp") as folder:
        hosts = Hosts(Path(folder))
        try:
            yield hosts
        finally:
            hosts.end()


@asynccontextmanager
async def engine_of(
    hosts: Hosts, leader: EngineLeader
) -> AsyncIterator[tuple[SglangProcess, SglangEngine]]:
    never: asyncio.Task[object] = asyncio.create_task(asyncio.Event().wait())
    async with running_engine(hosts.settings(), NAME, never, leader) as started:
        assert started is not None
        yield started
    never.cancel()


@asynccontextmanager
async def agent_of(
    hosts: Hosts, leader: EngineLeader, engine: SglangEngine, relay: Relay
) -> AsyncIterator[Subscriber]:
    staging = Staging(hosts.folder, NAME, uses_deltas=True)
    subscriber = subscriber_of(
        engine,
        model_tensors(hosts.folder / "model", dtype="float32"),
        staging,
        transport="tcp",
        num_ranks=2,
        key=KEY,
        others=leader,
    )
    async with running(subscriber.run(await relay.place())):
        yield subscriber
    staging.close()


@asynccontextmanager
async def relay_of(hosts: Hosts) -> AsyncIterator[Relay]:
    relay = Relay(hosts.folder, tensors=hosts.tensors, bucket_bytes=65_536)
    relay.listener.admit({KEY.public: KEY.name})
    async with running(relay.publisher.run(relay.near, relay.listener)):
        yield relay


async def holds(engine: SglangEngine, hosts: Hosts, step: int) -> None:
    """Check every tensor on both ranks."""
    version = {name: tensor + step for name, tensor in hosts.tensors.items()}
    expected = expected_checksums(version, EngineLayout(num_ranks=2))
    assert differing(expected, await engine.checksums()) == []


async def test_both_hosts_load_every_version_and_a_follower_that_dies_in_one_ends_the_engine(
    hosts: Hosts,
):
    follower = hosts.follow()

    async with (
        hosts.leader() as leader,
        relay_of(hosts) as relay,
        engine_of(hosts, leader) as (process, engine),
    ):
        watching = asyncio.create_task(watch_all(process, leader))
        async with agent_of(hosts, leader, engine, relay) as subscriber:
            for step in range(3):
                relay.publish(step)
                await adopts(subscriber, step)
                await holds(engine, hosts, step)
            params = SamplingParams(temperature=1.0, max_new_tokens=8, top_k=8, max_kept=8)
            (answer,) = await engine.sample([1, 2, 3], params, count=1)
            assert answer.version_starts == [(0, PolicyVersion(EPOCH, 2))]
            assert answer.kept is not None
            assert max(map(len, answer.kept)) <= 8
            fetched = [one.fetched_bytes["gpu-7/generator-0"] for one in relay.records]
            whole = 2 * relay.records[0].num_bytes  # each host all of it, deltas afterwards
            assert fetched[0] == whole > max(fetched[1:]) > 0
            # An order that was given up comes late, unchecked: that version is there no more.
            (received,) = hosts.folder.glob(f"{NAME}-weights-*")
            with pytest.raises(EngineError, match=r"load: .*[Cc]annot find any model weights"):
                await engine.adopt_folder(received / "v1.1", PolicyVersion(1, 1), digest="")
            # Rank 1 cannot load the next version, and rank 0 can: neither touches its live weights.
            (weights,) = hosts.folder.glob("sockets/*-node-1-*/memory")
            weights.unlink()
            relay.publish(3)
            await until_async(lambda: failures(relay))
            (answer,) = await engine.sample([1, 2, 3], params, count=1)
            assert answer.version_starts[0] in {(0, PolicyVersion(EPOCH, step)) for step in (2, 3)}
            await adopts(subscriber, 3)  # repaired, from other memory on both hosts
            await holds(engine, hosts, 3)
            assert any("rank 1 of this engine failed" in why for why in failures(relay))
            assert not any("pause" in got.phase_seconds for got in relay.records if got.failed)

            beyond = [one for one in listeners_of(tree_of(follower.pid)) if not one.on_loopback]
            assert not beyond

            follower.send_signal(signal.SIGSTOP)
            relay.publish(4)
            await until_async(lambda: relay.publisher.states()[0].state == "receiving")
            await asyncio.sleep(0.5)  # node 0 has it by now
            assert subscriber.adopted == PolicyVersion(EPOCH, 3)
            follower.kill()
            with pytest.raises(PeerLostError) as lost:
                await watching
    named = f"node 1 (host {socket.gethostname()}, rank 1) ended: a server of the engine failed"
    assert str(lost.value).startswith(f"{named} and it gave no sign of life for 3 s")
    until(lambda: not servers(), lambda: f"servers are left: {servers()}")


def test_node_0_admits_one_process_that_agrees_and_proves_its_key(hosts: Hosts):
    stop = asyncio.Event()

    async def scenario() -> list[int]:
        async with hosts.leader(stop=stop):  # yields once a follower is there
            codes = [await ended(hosts.follow())]
            codes.append(await ended(hosts.follow("generators.dtype=bfloat16")))
            stop.set()
            return codes

    async def ended(process: "subprocess.Popen[bytes]") -> int:
        return await asyncio.to_thread(process.wait, HANG_S)

    wrong = hosts.follow("generators.dtype=bfloat16")
    stranger = hosts.follow(
        f"run.key_file={hosts.folder}/other.key", "generators.rendezvous_timeout_s=3"
    )
    first = hosts.follow()
    assert asyncio.run(scenario()) == [3, 2]
    assert [one.wait(HANG_S) for one in (wrong, stranger, first)] == [2, 1, 0]
    difference = "generators.dtype is bfloat16 there, expected float32"
    assert difference in hosts.log(0).read_text()
    assert "or proves another key than this one (run.key_file)" in hosts.log(1).read_text()
    assert "two processes came as node 1" in hosts.log(3).read_text()
    assert difference in hosts.log(4).read_text()


async def test_a_follower_that_was_asked_to_end_waits_for_node_0(hosts: Hosts):
    follower = hosts.follow()
    stop = asyncio.Event()

    async with hosts.leader(stop=stop) as leader:
        node, store = await leader.start()
        with store:
            watching = asyncio.create_task(leader.watch())
            await until_async(lambda: "starting" in states(leader))
            follower.send_signal(signal.SIGTERM)
            async with asyncio.timeout(HANG_S):
                await stop.wait()
            assert follower.poll() is None
            watching.cancel()
    assert node.node == 0
    assert follower.wait(HANG_S) == 0, hosts.log(0).read_text()
    assert_gone(hosts)


async def test_a_silent_node_0_ends_the_ranks_of_a_follower(hosts: Hosts):
    follower = hosts.follow("generators.node_silence_s=3")

    async with hosts.leader() as leader:
        _, store = await leader.start()
        with store:
            await until_async(lambda: "starting" in states(leader))
            await until_async(lambda: len(tree_of(follower.pid)) > 1)
            # Nothing is heard or said while this loop is held up.
            assert follower.wait(HANG_S) == 1, hosts.log(0).read_text()
    silence = "ended: it gave no sign of life for 3 s (generators.node_silence_s)"
    assert silence in hosts.log(0).read_text()
    assert_gone(hosts)


# In `make test` node 0 is killed; above a follower is asked to end, beside a node 0 without ranks.
@pytest.mark.parametrize(
    ("who", "signum", "codes", "why"),
    [
        pytest.param(
            "node 0", signal.SIGINT, (0, 0), ("", ""), id="Ctrl-C", marks=pytest.mark.slow
        ),
        pytest.param(
            "node 1",
            signal.SIGTERM,
            (0, 0),
            ("was asked to end: the engine ends", "asked to end: node 0 hands its work back first"),
            id="a follower is asked to end",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "node 0",
            signal.SIGKILL,
            (-9, 1),
            (
                "",
                "node 0 (host HOST, rank 0) ended: a server of the engine failed and it gave no "
                "sign of life for 3 s",
            ),
            id="node 0 is killed",
        ),
        pytest.param(
            "rank 1",
            signal.SIGKILL,
            (1, 1),
            (
                "node 1 (host HOST, rank 1) ended: SGLang ended with code 0: ",
                "SGLang ended with code 0: ",
            ),
            id="a rank is killed",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_both_hosts_end_together_and_leave_nothing(
    hosts: Hosts, who: str, signum: int, codes: tuple[int, int], why: tuple[str, str]
):
    leader, follower = hosts.start(), hosts.follow()
    until(lambda: "engine answers at" in hosts.log(0).read_text())
    until(lambda: "its ranks run" in hosts.log(1).read_text())
    shared = shared_memory_of([*tree_of(leader.pid), *tree_of(follower.pid)])
    assert shared
    if who == "node 0":
        leader.send_signal(signum)
    elif who == "node 1":
        follower.send_signal(signum)
    else:
        (rank,) = [one for one in tree_of(follower.pid) if "TP1" in psutil.Process(one).name()]
        psutil.Process(rank).send_signal(signum)
    assert (leader.wait(HANG_S), follower.wait(HANG_S)) == codes, texts(hosts)
    for number, line in enumerate(why):
        shown = line.replace("HERE", hosts.rendezvous).replace("HOST", socket.gethostname())
        assert shown in hosts.log(number).read_text()
    until(lambda: not servers(), lambda: f"servers are left: {servers()}")
    if codes[0] >= 0:  # an agent that is killed cleans nothing up
        assert [path for path in shared if path.exists()] == []
        assert list((hosts.folder / "sockets").glob("*")) == []


def texts(hosts: Hosts) -> str:
    return "".join(file.read_text() for file in sorted(hosts.folder.glob("*.log")))


def failures(relay: Relay) -> list[str]:
    return [why for record in relay.records for why in record.failed.values()]


def states(leader: EngineLeader) -> list[str]:
    return [known.state for known in leader.book.known.values()]


def assert_gone(hosts: Hosts) -> None:
    """No server of the engine is left, and nothing in the folder of sockets."""
    until(lambda: not servers(), lambda: f"servers are left: {servers()}")
    assert list((hosts.folder / "sockets").glob("*")) == []


def servers() -> list[psutil.Process]:
    """Return what lives of SGLang and of the roles of this test, whoever their parent is now."""
    alive = []
    for one in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            words = [*one.cmdline(), one.name()]
            if any(word.startswith(("sglang", "slipstream.generators.")) for word in words):
                alive.append(one)
    return alive
