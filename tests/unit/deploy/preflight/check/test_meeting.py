"""What the first of several hosts takes as an answer, and what another host needs."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from slipstream.deploy.config import run_config
from slipstream.deploy.examples.addition import SHIPPED_POLICY
from slipstream.deploy.preflight.check.meeting import AskingHost, answer_first_host
from slipstream.wire.errors import ConfigError
from slipstream.wire.messages.followers import Follow, FollowerEnds, HostAnswered
from slipstream.wire.settings.load import load_table
from slipstream.wire.settings.rendezvous import Address
from tests.support.memberships import membership

ROOT = Path(__file__).parents[5]
HOSTS = ("head", "far", "away")


def first_of_three() -> AskingHost:
    """Return the first host, to which the others have come."""
    first = AskingHost(membership(0, 3, 0, facts={}))
    for node in (1, 2):
        come = Follow(node=node, incarnation=f"i{node}", host=HOSTS[node], pid=7, facts={})
        first.book.heard(f"peer {node}".encode(), come)
    return first


def answer(first: AskingHost, node: int, number: int, text: str, incarnation: str = "") -> None:
    incarnation = incarnation or f"i{node}"
    first.note_answer(HostAnswered(node=node, incarnation=incarnation, number=number, answer=text))


@asynccontextmanager
async def asking(first: AskingHost, node: int) -> AsyncIterator["asyncio.Task[str]"]:
    task = asyncio.create_task(first.ask(node, HOSTS[node], "generator-0", "{}", 1.0))
    await asyncio.sleep(0)
    yield task
    task.cancel()


async def test_only_the_host_that_was_asked_answers():
    first = first_of_three()
    answer(first, 1, 1, "before it was asked")
    async with asking(first, 1) as task:
        answer(first, 2, 1, "of another host")
        answer(first, 1, 1, "of another process", "other")
        answer(first, 1, 2, "to another question")
        answer(first, 1, 1, "its own")
        assert await task == "its own"


async def test_a_host_that_is_lost_keeps_no_reports_from_the_others_or_from_the_first():
    first = first_of_three()
    informing = asyncio.create_task(first.inform(HOSTS, "[]"))
    await asyncio.sleep(0.01)
    first.book.heard(b"peer 1", FollowerEnds(node=1, incarnation="i1", reason="it was killed"))
    answer(first, 2, 2, "")
    async with asyncio.timeout(5.0):
        await informing


def test_another_host_needs_a_key():
    words = [f"run.model={SHIPPED_POLICY}", 'deploy.hosts=["head", "far"]']
    table = load_table(ROOT / "configs" / "quickstart.toml", words)
    with pytest.raises(ConfigError, match=r"--node 1 needs run\.key_file: each host but"):
        answer_first_host(run_config(table), [], 1, Address("10.0.0.1", 29400), print)
