"""Stage 3: real SGLang on the device: logprobs, weights that change amid answers, checksums."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from itertools import pairwise
from pathlib import Path
from typing import Literal

from safetensors.torch import load_file

from benchmarks.device.engines import device_name, engine_dtype, engine_of, has_cuda, write_model
from benchmarks.device.report import Report, run_stage
from slipstream.generators.engine import Completion, SamplingParams
from slipstream.generators.sglang.engine import SglangEngine
from slipstream.weightbus.version.engine_checksums import (
    EngineLayout,
    differing,
    expected_checksums,
)
from slipstream.wire.messages.versions import PolicyVersion
from tests.support.engine_steps import load_folder, pause

_END = 2  # barred: no answer ends early
_LENGTH = 400
_LONG = SamplingParams(temperature=1.0, max_new_tokens=_LENGTH, min_new_tokens=_LENGTH)
_PROMPTS = ([3, 4, 13], [7, 8, 9, 10, 13, 5], [12] * 5, [4])
_ANSWERS = 2  # to each
_TRIES = 6  # to change weights while answers are in the making
_VERSIONS = tuple(PolicyVersion(1, step) for step in range(3))
_POLL_S = 0.02
Kind = tuple[str, Literal["retract", "in_place"], bool]
_KINDS: tuple[Kind, ...] = (
    ("retract", "retract", False),
    ("overlap", "retract", True),
    ("in_place", "in_place", False),
    *([("graphs", "retract", False)] if has_cuda() else []),  # recorded: the settings for users
)


class Oracle:
    """The learner's model and transformers on the CPU, in float32, as a process."""

    def __init__(self, folders: Sequence[Path], out: Path) -> None:
        with (out / "oracle.log").open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.in_flight_oracle", str(_END), *folders],
                env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    async def ask(self, question: dict[str, object]) -> list[list[float]] | list[float]:
        return await asyncio.to_thread(self._ask, question)

    def _ask(self, question: dict[str, object]) -> list[list[float]] | list[float]:
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise RuntimeError("the oracle has no pipes")
        stdin.write(json.dumps(question) + "\n")
        stdin.flush()
        if not (line := stdout.readline()):
            raise RuntimeError(f"the oracle ended with {self._process.wait()}: oracle.log")
        answer: list[list[float]] | list[float] = json.loads(line)
        return answer

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def work(report: Report, out: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="sp-", dir="/tmp") as name:
        folder = Path(name)
        models = [write_model(folder / v.label, seed=v.step) for v in _VERSIONS]
        oracle = Oracle(models, out)
        try:
            asyncio.run(_all_kinds(report, folder, models, oracle))
        finally:
            oracle.close()
            for log in folder.glob("*/logs/*.log"):
                shutil.copy(log, out / f"engine-{log.parts[-3]}.log")


async def _all_kinds(report: Report, folder: Path, models: Sequence[Path], oracle: Oracle) -> None:
    report.fact("device", device_name())
    async with AsyncExitStack() as engines:
        starting = {
            kind: asyncio.create_task(_started(engines, models[0], folder, kind, report))
            for kind in _KINDS
        }
        for kind, start in starting.items():
            with report.part(kind[0]):
                engine = await start
                async with asyncio.timeout(report.left_s):
                    await _check(report, engine, models, oracle, kind)


async def _started(
    engines: AsyncExitStack, model: Path, folder: Path, kind: Kind, report: Report
) -> SglangEngine:
    name, mode, overlaps = kind
    begun = engine_of(
        model,
        folder,
        name,
        mode=mode,
        overlaps=overlaps,
        graphs=name == "graphs",
        start_s=max(1.0, report.left_s),
    )
    _, engine = await engines.enter_async_context(begun)
    return engine


async def _check(
    report: Report, engine: SglangEngine, models: Sequence[Path], oracle: Oracle, kind: Kind
) -> None:
    name, mode, _ = kind
    answers = await _changed_twice(engine, models)
    thrice = sum(len(one.version_starts) == len(_VERSIONS) for _, one in answers)
    report.at_least(f"{name} answers of three versions", thrice, "answers", needs=1)
    offs, if_moved = [], []
    for prompt, answer in answers:
        exact = await _expected(oracle, prompt, answer, answer.version_starts, models, mode)
        offs += [abs(a - b) for a, b in zip(answer.logprobs, exact, strict=True)]
        if len(answer.version_starts) > 1:  # one boundary a token late
            first, version = answer.version_starts[1]
            starts = [answer.version_starts[0], (first + 1, version), *answer.version_starts[2:]]
            wrong = await _expected(oracle, prompt, answer, starts, models, mode)
            if_moved.append(abs(answer.logprobs[first] - wrong[first]))
            if_moved[-1] /= max(1e-9, abs(answer.logprobs[first] - exact[first]))
    # Narrow weights, against float32 ones: what is left is their rounding, not a wrong label.
    mean, most = sum(offs) / len(offs), max(offs)
    report.at_most(
        f"{name} logprobs vs learner", mean, "nats on average", needs=5e-2 if has_cuda() else 2e-5
    )
    report.fact(f"{name} largest difference", most)
    report.fact(f"{name} squared difference / 2 (KL)", sum(x * x for x in offs) / 2 / len(offs))
    report.fact(
        f"{name} times worse with a boundary moved, median", sorted(if_moved)[len(if_moved) // 2]
    )
    tensors = load_file(models[-1] / "model.safetensors")
    held = {one: tensor.to(engine_dtype()) for one, tensor in tensors.items()}
    wanted = expected_checksums(held, EngineLayout(device_name()))
    bad = differing(wanted, await engine.checksums())
    report.holds(f"{name} checksums are ours", not bad)
    if bad:
        report.fact(f"{name} tensors that differ", bad)


async def _changed_twice(
    engine: SglangEngine, models: Sequence[Path]
) -> list[tuple[list[int], Completion]]:
    """Return long answers in the making of which the weights changed twice."""
    for _ in range(_TRIES):
        await _change(engine, models[0], _VERSIONS[0])
        asked = [
            (prompt, asyncio.create_task(engine.sample(prompt, _LONG, count=_ANSWERS)))
            for prompt in _PROMPTS
        ]
        for model, version in zip(models[1:], _VERSIONS[1:], strict=True):
            enough = version.step * len(_PROMPTS) * _ANSWERS * _LENGTH // 5
            while not any(task.done() for _, task in asked):
                if (await engine.load()).used_tokens >= enough:
                    break
                await asyncio.sleep(_POLL_S)
            await _change(engine, model, version)
        answers = [(prompt, one) for prompt, task in asked for one in await task]
        if any(len(one.version_starts) == len(_VERSIONS) for _, one in answers):
            break
    return answers


async def _change(engine: SglangEngine, model: Path, version: PolicyVersion) -> None:
    """Change weights as a publish does."""
    await pause(engine)
    await load_folder(engine, model)
    await engine.label(version)
    await engine.resume()


async def _expected(
    oracle: Oracle,
    prompt: list[int],
    answer: Completion,
    starts: Sequence[tuple[int, PolicyVersion]],
    models: Sequence[Path],
    mode: Literal["retract", "in_place"],
) -> list[float]:
    """Return what each token's logprob must be if these are the runs of its versions."""
    sequence, begin = [*prompt, *answer.token_ids], len(prompt) - 1
    if mode == "in_place":  # over keys and values of the versions before
        runs = [
            (len(prompt) + first if first else 1, str(models[version.step]))
            for first, version in starts
        ]
        kept = await oracle.ask({"sequence": sequence, "runs": runs})
        return [value for value in kept[begin:] if isinstance(value, float)]
    values: list[float] = []
    ends = [*(first for first, _ in starts), len(answer.token_ids)]
    for (first, end), (_, version) in zip(pairwise(ends), starts, strict=True):
        (row,) = await oracle.ask({"model": str(models[version.step]), "sequences": [sequence]})
        if isinstance(row, list):
            values += row[begin:][first:end]
    return values


if __name__ == "__main__":
    run_stage("engine", work)
