"""The agent quickstart's task, environment and policy: sums of three numbers, and a tool for two.

The policy ships with the project, in ``sums_policy``. ``make policy`` makes it again.
"""

import random
from pathlib import Path

from typing_extensions import override

from slipstream.deploy.examples.addition import copy_folder, locked, write_rows
from slipstream.generators.environments.sdk import Environment, Prompt, Reply, Step

SHIPPED_POLICY = Path(__file__).with_name("sums_policy")
HELD_OUT = 256
_PROBLEMS = 8192
Problem = tuple[int, int, int]


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


class Sums(Environment):
    """Asks for a sum of three numbers and rewards the right answer, however it was found."""

    tools = (add,)

    @override
    async def reset(self, prompt: Prompt) -> str:
        self._sum = str(prompt.ground_truth)
        self._calls = 0
        return prompt.text

    @override
    async def step(self, reply: Reply) -> Step:
        if not reply.tool_calls:
            is_right = float(reply.text == self._sum)
            return Step(done=True, reward=is_right, parts={"calls": self._calls})
        self._calls += len(reply.tool_calls)
        results = [await self.call(call) for call in reply.tool_calls]
        return Step(messages=results, reward=0.0, parts={"calls": self._calls})


def problems() -> list[Problem]:
    """Return three numbers of two digits each, all different; the first ones are held out."""
    draw = random.Random(7)  # noqa: S311 not for secrets
    numbers = draw.sample(range(90**3), _PROBLEMS)
    return [(10 + n // 8100, 10 + n // 90 % 90, 10 + n % 90) for n in numbers]


def question(problem: Problem) -> str:
    """Return the text of a problem."""
    return "+".join(map(str, problem)) + "="


def prepare(folder: Path) -> None:
    """Put the problems and the shipped policy into ``folder``.

    Leaves ``train.jsonl``, ``held_out.jsonl`` and ``model/``. Each appears whole or not at all,
    and files with the right bytes are left alone.
    """
    with locked(folder):
        write_sums(folder)
        copy_folder(SHIPPED_POLICY, folder / "model")


def write_sums(folder: Path) -> None:
    """Split the problems into held-out ones and the others."""
    everything = problems()
    for name, part in (("held_out", everything[:HELD_OUT]), ("train", everything[HELD_OUT:])):
        rows = [
            {"prompt": question(terms), "ground_truth": str(sum(terms)), "data_source": "sums"}
            for terms in part
        ]
        write_rows(folder / f"{name}.jsonl", rows)
