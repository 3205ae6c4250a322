"""Environments in processes of their own, before an engine that says what it is told."""

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from slipstream.generators.capture.server import CaptureServer
from slipstream.generators.engine import SamplingParams
from slipstream.generators.environments.host import (
    EnvironmentFailedError,
    EnvironmentHost,
    ProcessLimits,
)
from slipstream.generators.environments.messages import BeginTrajectory
from slipstream.generators.environments.rollout import (
    TrajectoryOutcome,
    run_trajectory,
    transcript_text,
)
from slipstream.generators.text.chat_template import ChatTemplate
from slipstream.generators.text.images import ImageMarks
from slipstream.generators.turns.calls import TrajectoryCalls
from slipstream.generators.turns.conversation import Conversation
from slipstream.generators.turns.images import TrajectoryImages
from slipstream.generators.turns.rendering import MessageRendering
from slipstream.wire.errors import ConfigError
from slipstream.wire.messages.images import digest_of
from slipstream.wire.messages.trajectory import ChatMessage, ContentPart, Prompt
from slipstream.wire.models.pixels import checked_image
from tests.integration.environments.guessing import png
from tests.support.playing import hosted, play
from tests.support.tiny_run import ROOT
from tests.support.waiting import HANG_S, until_async
from tests.unit.generators.capture.test_capture import CALL, Engine, parse
from tests.unit.generators.capture.test_images_of_agents import LAW
from tests.unit.generators.capture.test_images_of_agents import TEMPLATE as SEEN
from tests.unit.generators.turns.test_rendering import END, STOP, TOOLS, decode, encode, token_text

pytestmark = pytest.mark.integration
HERE = Path(__file__).parent / "environments" / "guessing.py"
LIMITS = ProcessLimits(memory_mb=300, max_processes=32)


@asynccontextmanager
async def host(
    name: str,
    limits: ProcessLimits = LIMITS,
    *,
    jailed: bool = True,
    variables: Mapping[str, str] = {},
    **options: object,
) -> AsyncIterator[EnvironmentHost]:
    started = await EnvironmentHost.start(
        f"{HERE}:{name}",
        options,
        limits,
        jailed=jailed,
        environment={"PATH": os.defpath, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", **variables},
    )
    try:
        yield started
    finally:
        await started.close()


def calls_at(
    engine: Engine, *, max_turns: int = 9, max_tokens: int = 9_999, template: str = TOOLS
) -> TrajectoryCalls:
    return TrajectoryCalls(
        sample=engine.sample,
        params=SamplingParams(temperature=1.0, max_new_tokens=400),
        rendering=MessageRendering(
            ChatTemplate(template, {}, origin="test"), encode, token_text, {END, STOP}
        ),
        conversation=Conversation(max_turns=max_turns, max_tokens=max_tokens),
        encode=encode,
        decode=lambda ids: decode([one for one in ids if one not in {END, STOP}]),
        parse=parse,
    )


PROMPT = Prompt(prompt="which?", ground_truth=7)


async def tried(
    environment: EnvironmentHost, *says: str, timeout_s: float = HANG_S
) -> TrajectoryOutcome:
    return await run_trajectory(
        environment, calls_at(Engine(list(says))), PROMPT, timeout_s=timeout_s
    )


def num_children() -> int:
    return len(psutil.Process().children(recursive=True))


async def outcome(
    name: str, *says: str, timeout_s: float = HANG_S, **options: int
) -> tuple[TrajectoryOutcome, TrajectoryCalls]:
    its = calls_at(Engine(list(says)), **options)
    async with host(name) as environment:
        return await run_trajectory(environment, its, PROMPT, timeout_s=timeout_s), its


async def test_an_environment_shows_images_of_files_and_bytes_besides_those_of_the_prompt():
    images = [png(shade=shade) for shade in (9, 1, 2)]
    stored: list[bytes] = []

    async def store(content: bytes) -> None:
        stored.append(content)

    its = calls_at(Engine(["a", "b", "c"]), template=SEEN)
    part = ContentPart(image=checked_image(images[0]))
    prompt = Prompt(prompt=(ChatMessage("user", (ContentPart(text="see "), part)),))
    its.images = TrajectoryImages(ImageMarks(LAW), prompt.images, store)
    async with host("Showing") as environment:
        found = await run_trajectory(environment, its, prompt, timeout_s=HANG_S)
    assert (found.ended_by, found.reward) == ("environment", 3.0)
    assert stored == images[1:]  # the run has the prompt's
    tokens = its.images.encoded(its.conversation.token_ids)
    assert [span.digest for span in tokens.images] == [digest_of(image) for image in images]
    assert its.conversation.branches == ()
    assert "user: now [image " in transcript_text(found.messages).replace("\n", "")


async def test_policy_and_environment_take_turns_until_it_is_done():
    found, its = await outcome("Guess", "3", "9", "7")
    assert (found.ended_by, found.reward, found.rewards) == (
        "environment",
        0.5,
        [-0.25, -0.25, 1.0],
    )
    assert found.parts == {"guesses": 3.0}
    assert its.conversation.branches == ()
    assert decode(its.conversation.token_ids) == (
        "<|user|>\nwhich?<|end|>\n<|assistant|>\n3<|end|>"
        "\n<|user|>\nno<|end|>\n<|assistant|>\n9<|end|>"
        "\n<|user|>\nno<|end|>\n<|assistant|>\n7<|end|>"
    )


async def test_tools_are_called_and_what_they_raise_is_their_result():
    says = [
        "CALL " + CALL,
        'CALL {"name": "fail", "arguments": {"why": "so"}}',
        'CALL {"name": "none", "arguments": {}}',
        "done",
    ]
    found, _ = await outcome("Tools", *says)
    results = [one["content"] for one in found.messages if one["role"] == "tool"]
    assert results == [
        "it",
        "error: RuntimeError: so",
        "error: there is no tool none, only look, fail",
    ]
    assert found.reward is None


@pytest.mark.parametrize(
    ("options", "ended_by"), [({"max_turns": 2}, "turns"), ({"max_tokens": 90}, "tokens")]
)
async def test_a_trajectory_ends_at_its_limits_with_what_it_has(
    options: dict[str, int], ended_by: str
):
    found, its = await outcome("Guess", *"1234568", **options)
    assert found.ended_by == ended_by
    assert its.conversation.num_turns == len(found.rewards) == 2
    assert found.reward == -0.5


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Crashes", "its process ended by signal 11"),
        ("Exits", "its process ended with code 7"),
        ("Raises", "ValueError: what is x?"),
        ("Busy", "its server is busy"),
        ("Huge", r"says 100000\d\d bytes, at most 8388608 in a turn"),
        ("Binary", "content of a message is bytes, expected text"),
        ("Grows", "took more than environment.memory_mb = 300"),
        ("HoldsFiles", "took more than environment.memory_mb = 300"),
        ("asks_nothing", "there is no endpoint"),
    ],
)
async def test_an_environment_that_fails_gives_a_reason_and_no_reward(name: str, why: str):
    with pytest.raises(EnvironmentFailedError, match=why):
        await outcome(name, "x")


async def test_shared_memory_is_the_environments_own_and_bounded():
    async with host(
        "FillsSharedMemory", ProcessLimits(memory_mb=150, max_processes=32)
    ) as environment:
        found = await tried(environment, "x")
        assert found.parts == {"errno": float(errno.ENOSPC), "written": 600.0}
        assert not Path("/dev/shm/fills-0").exists()  # noqa: ASYNC240, S108 one look


async def test_one_that_hangs_is_killed_at_the_deadline_of_its_trajectory():
    async with host("Hangs") as environment:
        began = asyncio.get_running_loop().time()
        with pytest.raises(EnvironmentFailedError, match=r"environment\.timeout_s = 1"):
            await tried(environment, "x", timeout_s=1.0)
        assert asyncio.get_running_loop().time() - began < HANG_S / 2
        assert not environment._acting


async def test_a_process_that_never_connects_is_killed_and_its_trajectory_fails():
    impatient = ProcessLimits(memory_mb=300, max_processes=32, connect_s=0.5)
    async with host("NeverConnects", impatient) as environment:
        before = num_children()
        for _ in range(2):
            with pytest.raises(
                EnvironmentFailedError, match=r"does not connect: it used no CPU .* for 0\.5 s"
            ):
                await tried(environment, "x")
        assert environment.replaced == {"connect": 2}
        assert num_children() == before


async def test_one_that_is_given_up_before_it_connects_is_killed_too():
    async with host("NeverConnects") as environment:
        before = num_children()
        for timeout_s in (1.0, 0.0):  # when it has begun, and before that
            with pytest.raises(EnvironmentFailedError, match=r"environment\.timeout_s"):
                await tried(environment, "x", timeout_s=timeout_s)
        await until_async(lambda: num_children() == before)


async def test_a_loader_that_forks_no_more_is_replaced():
    impatient = ProcessLimits(memory_mb=300, max_processes=32, connect_s=0.5)
    async with host("Guess", impatient) as environment:
        assert environment._loader is not None
        stopped = psutil.Process(environment._loader.pids[0]).children(recursive=True)
        for one in stopped:
            one.suspend()
        with pytest.raises(EnvironmentFailedError, match="does not fork"):
            await tried(environment, "7")
        await until_async(lambda: environment.replaced["loader"])
        environment._limits = LIMITS  # patient with what is slow alone
        assert (await tried(environment, "7")).reward == 1.0


async def test_a_loader_that_does_nothing_beside_a_busy_neighbour_is_replaced():
    impatient = ProcessLimits(memory_mb=300, max_processes=32, connect_s=1.0)
    async with host("BusyLoop") as environment:
        async with environment.trajectory() as neighbour:
            await neighbour.tell(BeginTrajectory(prompt=PROMPT))
            await until_async(lambda: psutil.Process(neighbour.pid).cpu_times().user > 0.5)
            assert environment._loader is not None
            for pid in environment._loader.main_pids:
                psutil.Process(pid).suspend()
            environment._limits = impatient
            with pytest.raises(EnvironmentFailedError, match="does not fork"):
                await tried(environment, "7")
        await until_async(lambda: environment.replaced["loader"])


async def test_a_library_whose_threads_the_module_has_started_works_in_a_trajectory():
    """Its handlers of forks have to be called: no thread is there in what was forked."""
    function, variables = (
        f"{HERE.with_name('matrices.py')}:Multiplies",
        {"OPENBLAS_NUM_THREADS": "4"},
    )
    async with hosted(function, variables=variables) as started:
        assert (await play(started, PROMPT, "go on")).reward == 1.0


async def test_a_library_may_start_threads_in_the_loader_after_each_fork():
    function = f"{HERE.with_name('threads_of_forks.py')}:StartsThreads"
    async with hosted(function, {"handler": "after_in_parent"}) as started:
        assert [(await play(started, PROMPT, "go on")).reward for _ in range(2)] == [0.0, 1.0]


async def test_a_process_in_which_a_library_has_started_a_thread_is_no_trajectorys():
    """That thread would keep the loader's mounts, and make any system call."""
    function = f"{HERE.with_name('threads_of_forks.py')}:StartsThreads"
    async with hosted(function, {"handler": "after_in_child"}) as started:
        with pytest.raises(EnvironmentFailedError):
            await play(started, PROMPT, "go on")


async def test_a_process_whose_first_thread_has_ended_is_measured():
    function = f"{HERE.with_name('first_thread_ends.py')}:FirstThreadEnds"
    async with hosted(function, limits=ProcessLimits(memory_mb=400, max_processes=64)) as started:
        with pytest.raises(EnvironmentFailedError, match="memory_mb"):
            await play(started, PROMPT, "go on")


async def test_a_trajectory_may_run_programs_in_the_sandbox():
    async with host("RunsPrograms") as environment:
        found = await tried(environment, "print(6 * 7)")
        assert (found.reward, found.parts) == (42.0, {"ok": 1.0})


@pytest.fixture
def for_all(tmp_path: Path) -> Path:
    """A folder to write to for trajectories too: those of root have a user id of their own."""
    tmp_path.chmod(0o777)
    return tmp_path


async def test_nothing_that_a_trajectory_started_is_left(for_all: Path):
    file = for_all / "pids"
    async with host("Leaves") as environment:
        before = num_children()
        found = await tried(environment, str(file))
        assert found.reward == 1.0
        assert len(file.read_text().split()) == 2
        await until_async(lambda: num_children() == before)


@pytest.mark.parametrize("jailed", [True, False])
async def test_what_a_trajectory_that_died_has_started_is_killed_too(for_all: Path, jailed: bool):
    file = for_all / "pid"
    async with host("LeavesAnOrphan", jailed=jailed) as environment:
        before = num_children()
        with pytest.raises(EnvironmentFailedError, match="ended with code 3"):
            await tried(environment, str(file))
        assert file.read_text()
        await until_async(lambda: num_children() <= before)


async def test_trajectories_run_side_by_side_and_one_that_fails_costs_no_other():
    async with host("Guess") as environment:

        async def one(*says: str) -> float | None:
            its = calls_at(Engine(list(says)))
            return (await run_trajectory(environment, its, PROMPT, timeout_s=HANG_S)).reward

        rewards = await asyncio.gather(
            one("7"), one("1", "7"), *(one("fail") for _ in range(3)), return_exceptions=True
        )
        assert rewards[:2] == [1.0, 0.75]
        assert all(isinstance(error, Exception) for error in rewards[2:])


async def test_the_process_that_has_it_imported_is_replaced_when_it_is_lost():
    async with host("Guess") as environment:
        assert environment._loader is not None
        (pid,) = environment._loader.pids
        os.kill(pid, 9)
        await until_async(lambda: environment.replaced["loader"])
        found = await tried(environment, "7")
        assert found.reward == 1.0


async def driven(
    name: str,
    *,
    says: Sequence[str] = ("7", "yes"),
    limits: Mapping[str, int] = {},
    variables: Mapping[str, str] = {},
    **options: object,
) -> tuple[TrajectoryOutcome, TrajectoryCalls]:
    its = calls_at(Engine(list(says)), **limits)
    server = CaptureServer(host="127.0.0.1", port=0, model="policy", token_text=token_text)
    await server.start()
    try:
        async with host(name, variables=variables, **options) as environment:
            found = await run_trajectory(environment, its, PROMPT, timeout_s=HANG_S, server=server)
    finally:
        await server.close()
    return found, its


async def test_an_agent_that_drives_itself_has_the_policy_behind_a_client():
    found, its = await driven("rollout")
    assert (found.reward, found.parts) == (1.0, {"length": 1.0})
    assert not found.has_turn_rewards
    assert len(its.conversation.branches) == 1  # it forgot what it had asked
    assert [one["role"] for one in found.messages] == ["user", "assistant"]


@pytest.mark.parametrize("name", ["rollout", "asks_with_a_client_of_its_own"])
async def test_proxies_of_its_tools_do_not_stand_before_the_endpoint_of_an_agent(name: str):
    nowhere = "http://127.0.0.1:9"  # nobody listens there
    names = ("http_proxy", "HTTPS_PROXY", "all_proxy")
    variables = {**dict.fromkeys(names, nowhere), "NO_PROXY": "corp.example"}
    found, its = await driven(name, variables=variables)
    assert (found.reward, its.conversation.num_turns) == (1.0, 2)


@pytest.mark.parametrize(
    ("limits", "ended_by", "num_turns"),
    [({"max_turns": 2}, "turns", 2), ({"max_tokens": 90}, "tokens", 2)],
)
async def test_an_agent_that_meets_a_limit_has_a_trajectory_that_was_cut_off(
    limits: dict[str, int], ended_by: str, num_turns: int
):
    found, its = await driven("asks_on", says="123456789", limits=limits)
    assert (found.ended_by, found.reward) == (ended_by, None)
    assert its.conversation.num_turns == num_turns


@pytest.mark.parametrize("name", ["Guess", "asks_on"])
async def test_a_prompt_that_leaves_no_room_is_no_trajectory(name: str):
    with pytest.raises(
        EnvironmentFailedError, match=r"the first prompt is too long: .*a prompt of 31 tokens"
    ):
        await driven(name, limits={"max_tokens": 3})


async def test_an_agent_that_drives_itself_may_reward_each_reply():
    found, its = await driven("rewards_turns")
    assert (found.reward, found.rewards, found.parts) == (0.75, [0.25, 0.5], {"length": 1.0})
    assert its.conversation.by_turn([0.25, 0.5]) == (0.25, 0.5)
    found, _ = await driven("rewards_turns", score=2.0)
    assert (found.reward, found.rewards) == (2.0, [0.25, 0.5])
    with pytest.raises(EnvironmentFailedError, match=r"has 3 numbers, .* gave 2 replies"):
        await driven("rewards_turns", count=3)


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("Nothing", {}, "AttributeError"),
        ("NoStep", {}, "a class without a method step"),
        ("not_async", {}, "is a function and not async"),
        ("BadTool", {}, "tool untyped: argument at has no type"),
        ("Guess", {"least": 1}, "environment.options"),
        ("HERE", {}, "AttributeError"),
    ],
)
async def test_what_is_no_environment_is_refused_at_the_start(
    name: str, options: dict[str, object], why: str
):
    with pytest.raises(ConfigError, match=why):
        async with host(name, **options):
            pass
