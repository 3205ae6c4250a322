"""Plays environments as a generator does, with an engine that says what it is told."""

import asyncio
import os
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from slipstream.generators.capture.server import CaptureServer
from slipstream.generators.engine import SamplingParams
from slipstream.generators.environments.host import EnvironmentHost, ProcessLimits
from slipstream.generators.environments.rollout import TrajectoryOutcome, run_trajectory
from slipstream.generators.text.chat_template import ChatTemplate
from slipstream.generators.turns.calls import TrajectoryCalls
from slipstream.generators.turns.conversation import Conversation
from slipstream.generators.turns.rendering import MessageRendering
from slipstream.wire.messages.trajectory import Json, Prompt
from tests.support.tiny_run import ROOT
from tests.support.waiting import HANG_S
from tests.unit.generators.capture.test_capture import Engine, parse
from tests.unit.generators.turns.test_rendering import END, STOP, TOOLS, decode, encode, token_text

LIMITS = ProcessLimits(memory_mb=1500, max_processes=128)


def run(test: Coroutine[None, None, None]) -> None:
    """Run a test that ends in time."""

    async def in_time() -> None:
        async with asyncio.timeout(HANG_S):
            await test

    asyncio.run(in_time())


def calls_of(engine: Engine, *, max_turns: int = 30) -> TrajectoryCalls:
    """Return the calls of a trajectory at an engine."""
    return TrajectoryCalls(
        sample=engine.sample,
        params=SamplingParams(temperature=1.0, max_new_tokens=4_000),
        rendering=MessageRendering(
            ChatTemplate(TOOLS, {}, origin="test"), encode, token_text, {END, STOP}
        ),
        conversation=Conversation(max_turns=max_turns, max_tokens=1_000_000),
        encode=encode,
        decode=lambda ids: decode([one for one in ids if one not in {END, STOP}]),
        parse=parse,
    )


@asynccontextmanager
async def hosted(
    function: str,
    options: Mapping[str, Json] | None = None,
    *,
    libraries: Sequence[Path] = (),
    limits: ProcessLimits = LIMITS,
    hide: Sequence[Path] = (),
    variables: Mapping[str, str] | None = None,
) -> AsyncIterator[EnvironmentHost]:
    """Yield an environment's processes; ``libraries`` are folders that it finds packages in."""
    found = [*map(str, libraries), str(ROOT / "src"), str(ROOT)]
    started = await EnvironmentHost.start(
        function,
        options or {},
        limits,
        hide=hide,
        environment={"PATH": os.defpath, "PYTHONPATH": ":".join(found), **(variables or {})},
    )
    try:
        yield started
    finally:
        await started.close()


async def play(
    host: EnvironmentHost,
    prompt: Prompt,
    *says: str,
    max_turns: int = 30,
    timeout_s: float = HANG_S,
) -> TrajectoryOutcome:
    """Run a trajectory in which the policy says this."""
    calls = calls_of(Engine(list(says)), max_turns=max_turns)
    if not host.drives_itself:
        return await run_trajectory(host, calls, prompt, timeout_s=timeout_s)
    server = CaptureServer(host="127.0.0.1", port=0, model="policy", token_text=token_text)
    await server.start()
    try:
        return await run_trajectory(host, calls, prompt, timeout_s=timeout_s, server=server)
    finally:
        await server.close()


async def played(
    function: str,
    prompt: Prompt,
    *says: str,
    max_turns: int = 30,
    **hosting: Any,  # noqa: ANN401
) -> TrajectoryOutcome:
    """Start an environment, and run one trajectory in it."""
    async with hosted(function, **hosting) as host:
        return await play(host, prompt, *says, max_turns=max_turns)


def heard(outcome: TrajectoryOutcome, role: str = "user") -> list[Json]:
    """Return what an environment said."""
    return [one["content"] for one in outcome.messages if one["role"] == role]
