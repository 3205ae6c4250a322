"""Agents that rewrite, branch and die: what is trained is what an engine says that it sampled.

Logprobs, and replies that are lost on their way: tests/integration/test_agent_custody.py.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from slipstream.wire.messages.versions import parse_label
from tests.support.custody import Chosen, Reply, Sampled, Tokens, replies_after, take
from tests.support.processes import tree_of
from tests.support.several_turns import environment_server
from tests.support.strangers import Attacked, assert_held, attack
from tests.support.tiny_run import ROOT, TinyRun
from tests.support.tool_policy import write_tool_policy

pytestmark = [pytest.mark.e2e]
AGENT = ROOT / "tests" / "e2e" / "environments" / "wandering.py"
SAME = 1e-4
FEW_FILES = 4_096  # the fewest that a broker takes; strangers try to take them all


def engine_record(run: TinyRun) -> Sampled:
    """Return each request that the engines finished, by their own logs."""
    sampled: Sampled = Counter()
    for path in (run.folder / "logs").glob("*-sglang.log*"):
        for line in path.read_text(errors="replace").splitlines():
            at = line.find('{"timestamp"')
            if at < 0 or '"request.finished"' not in line:
                continue
            row = json.loads(line[at:])
            outs = row["out"] if isinstance(row["out"], list) else [row["out"]]
            for out in outs:
                spans = out["meta_info"]["weight_versions"]
                steps = [
                    parse_label(span["version"]).step
                    for span in spans
                    for _ in range(span["start"], span["end"])
                ]
                reply = tuple(map(Chosen, out["output_ids"], steps))
                sampled[tuple(row["obj"]["input_ids"]), reply] += 1
    return sampled


def trained_turns(row: dict[str, Any]) -> Iterator[tuple[Tokens, Reply]]:
    """Yield what each turn was chosen after, and its tokens."""
    tokens, runs = row["token_ids"], row["version_runs"]
    bounds = [0, *(run["first_token"] for run in runs[1:]), len(tokens)]
    steps = [
        run["step"]
        for run, (start, end) in zip(runs, pairwise(bounds), strict=True)
        for _ in range(start, end)
    ]
    turns = [(turn["first_token"], turn["num_tokens"]) for turn in row["turns"]]
    return replies_after(list(map(Chosen, tokens, steps)), turns, row["branches"])


@pytest.mark.parametrize(
    ("steps", "groups_per_step"),
    [(4, 8), pytest.param(64, 16, marks=pytest.mark.slow)],
    ids=["64", "2048"],
)
def test_trained_tokens_are_those_that_the_engine_sampled(
    tmp_path: Path, steps: int, groups_per_step: int
) -> None:
    """With compaction, edits, parallel calls, cancelled streams, agents that die, and publishes.

    The agents are on a server, which is started as documented.
    """
    (tmp_path / "died").mkdir()
    (tmp_path / "died").chmod(0o777)  # root's environments write what everybody may
    environment = {
        "environment.function": f"{AGENT}:rollout",
        "environment.options.deaths": 0.1 if steps == 4 else 0.01,
        "environment.options.died": tmp_path / "died",
        "environment.max_turns": 24,
        "environment.max_tokens": 1000,
        "environment.tool_call_parser": "qwen25",
    }
    attacked: list[Attacked] = []
    with environment_server(tmp_path, environment, few_files=FEW_FILES) as there:
        run = TinyRun(
            tmp_path,
            {
                **environment,
                **there,
                "broker.listen": "tcp://127.0.0.1:0",
                "weightbus.listen": "tcp://127.0.0.1:0",
                "run.steps": steps,
                "run.groups_per_step": groups_per_step,
                "data.file": tmp_path / "train.jsonl",
                "eval.file": tmp_path / "held_out.jsonl",
                "eval.every_steps": steps // 2,
                "sampling.max_prompt_tokens": 64,
                "sampling.max_response_tokens": 16,
                "generators.max_sequences": 16,
                "generators.sglang.log_requests": True,
                "generators.sglang.log_requests_level": 3,
                "generators.sglang.log_requests_format": "json",
                "learner.rollouts_per_step": 1000,
                "learner.max_rollout_bytes": 1 << 30,
            },
            before=prepare,
            few_files=FEW_FILES,
        )
        run.wait_until(lambda: run.steps() >= 1, "a step")
        attacked = attack(tree_of(os.getpid()))
        if steps > 4:
            run.wait_until(lambda: run.steps() >= steps // 4, "a quarter of the run")
            generator = run.process_with("slipstream.generators.main")
            assert generator is not None
            generator.kill()
        assert run.wait() == 0, run.output
    assert_held(attacked)
    assert Counter((role_of(one.program), one.kind) for one in attacked) == {
        ("broker", "ROUTER"): 1,
        ("broker", "HTTP"): 1,  # the page
        ("relay", "ROUTER"): 2,
        ("generators", "HTTP"): 1,  # the endpoint of agents
        ("environments", "ROUTER"): 1,
        ("environments", "HTTP"): 1,
    }
    summary, rows = run.summary(), run.rollouts()
    count = steps * groups_per_step * 2
    assert (summary["finished"], summary["unaccounted"]) == (True, 0)
    assert len(rows) == len({(row["group_id"], row["sibling"]) for row in rows}) == count

    sampled = engine_record(run)
    assert sampled
    turns = [turn for row in rows for turn in trained_turns(row)]
    strangers = [turn for turn in turns if not take(sampled, *turn)]
    assert not strangers, f"{len(strangers)} of {len(turns)} turns, such as {strangers[0]}"

    for row in rows:
        runs = row["version_runs"]
        assert all(one["first_token"] < other["first_token"] for one, other in pairwise(runs))
    fresh = [difference for lag, difference in run.differences() if lag == 0]
    assert len({one["step"] for row in rows for one in row["version_runs"]}) >= steps - 1
    assert len(fresh) > count / 4
    assert max(fresh) < SAME
    did = Counter[str]()
    for row in rows:
        did.update({name: int(value) for name, value in row["parts"].items()})
    assert all(did[name] for name in ("calls", "together", "cancel", "compacted", "edited"))
    assert summary["queue"]["restarted_trajectories"] >= 2
    assert "its process ended with code 9" in run.log("broker")
    assert sum(map(bool, (row["branches"] for row in rows))) > count / 8
    assert_row_1_is_a_dead_letter(run, steps)
    run.assert_nothing_left()


def role_of(program: str) -> str:
    """Return the package that a process runs, of the words of its command."""
    return next(
        (word.split(".")[-2] for word in program.split() if word.endswith(".main")), program
    )


def prepare(folder: Path) -> None:
    """Have a policy that calls tools, and few prompts: each is asked for in every run."""
    write_tool_policy(folder / "model")
    for name, count in (("train", 20), ("held_out", 6)):
        path = folder / f"{name}.jsonl"
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:count]))


def assert_row_1_is_a_dead_letter(run: TinyRun, steps: int) -> None:
    """A failure is no reward of 0, in training or evaluation."""
    summary = run.summary()
    assert summary["dropped"]["lease_exhausted"] >= 1
    assert "RuntimeError: there is no world for row 1" in run.log("broker")
    points = [(point["step"], point["overall"]) for point in summary["eval"]]
    assert [
        (step, found["num_problems"], found["num_answers"], found["num_dropped"])
        for step, found in points
    ] == [(step, 6, 5, 1) for step in (0, steps // 2, steps)]
