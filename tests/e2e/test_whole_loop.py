"""Every role as a process of its own: SGLang, megatron-core, a Redis-compatible server."""

import json
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
from safetensors.torch import load_file

from slipstream.broker.report.summary import PUBLISHES
from slipstream.weightbus.version.engine_checksums import (
    EngineLayout,
    digest_of,
    expected_checksums,
)
from tests.support.hub_form import as_family_of_the_hub
from tests.support.random_llama import make_qwen3, make_qwen3_moe, with_whole_blocks
from tests.support.served import SAME, assert_trained_and_served
from tests.support.tiny_run import TinyRun

pytestmark = [pytest.mark.e2e]
BOUND = 2


@pytest.mark.parametrize(
    ("transport", "temperature", "lr", "engines"),
    [
        ("collective", 1.0, 1e-3, 1),
        # tests/integration/test_transports.py has every transport with a real engine, and
        # tests/e2e/test_remote_roles.py two engines that hold the same.
        pytest.param("tcp", 1.0, 1e-3, 2, marks=pytest.mark.slow),
        pytest.param("disk", 1.0, 1e-3, 2, marks=pytest.mark.slow),
        # tests/e2e/test_targets.py compares at temperature 0.6 too.
        pytest.param("collective", 0.6, 0.0, 2, marks=pytest.mark.slow),
    ],
)
def test_publishes_land_in_long_generations_and_every_token_keeps_its_policy(
    start_run: Callable[..., TinyRun],
    inputs: Path,
    transport: str,
    temperature: float,
    lr: float,
    engines: int,
):
    run = start_run(
        generators__count=engines,
        run__steps=6,
        run__groups_per_step=2,
        run__max_staleness_steps=BOUND,
        sampling__temperature=temperature,
        sampling__min_response_tokens=200,
        sampling__max_response_tokens=240,
        generators__max_sequences=8,  # two steps' groups at once: the second lands in mid-answer
        learner__lr=lr,
        weightbus__transport=transport,
        eval__file=inputs / "held_out.jsonl",
        eval__before_train="false",
    )
    assert run.wait() == 0, run.output
    summary, rollouts = run.summary(), run.rollouts()

    assert summary["outcome"] == "finished"
    assert summary["trained"] == 12
    assert summary["equation"]["unaccounted"] == 0
    assert summary["issued"] == summary["trained"] + sum(summary["dropped"].values())
    assert set(summary["staleness_histogram"]) <= {str(lag) for lag in range(BOUND + 1)}
    assert len(rollouts) == 24
    for row in rollouts:
        assert len(row["token_ids"]) - row["num_prompt_tokens"] >= 200
        assert row["temperature"] == temperature
        for version in row["version_runs"]:
            assert 0 <= row["step"] - version["step"] <= BOUND

    crossing = [row for row in rollouts if len(row["version_runs"]) > 1]
    assert crossing, "no publish landed while a long answer was being generated"
    steps = [[version["step"] for version in row["version_runs"]] for row in crossing]
    assert all(later > earlier for row in steps for earlier, later in pairwise(row))
    assert summary["publishes_while_generating"] > 0
    rejected = {
        name: n for name, n in summary["queue"].items() if name.startswith("rejected") and n
    }
    assert not rejected, "a healthy run sends nothing that is refused"

    differences = run.differences()
    unmoved = [d for lag, d in differences if lag == 0 or lr == 0]
    assert unmoved
    assert max(unmoved) < SAME
    if lr > 0:
        assert min(d for lag, d in differences if lag > 0) > SAME, "the weights did not move"

    publish = summary["last_publish"]
    final = load_file(run.folder / "model" / "model.safetensors")
    expected = digest_of(expected_checksums(final))
    names = [f"generator-{number}" for number in range(engines)]
    assert publish["version"] == [1, 6]
    assert set(publish["transports"].values()) == {transport}
    assert publish["engine_digests"] == dict.fromkeys(names, expected)
    publishes = summary[PUBLISHES]
    assert len(publishes) > 1
    for one in publishes:  # checked tensor by tensor before it was committed
        assert set() < set(one["adopted_by"]) <= set(names)
        assert one["failed"] == {}
        assert set(one["transports"].values()) <= {"tcp", transport}
    assert summary["eval"][0]["overall"]["num_answers"] == 64
    run.assert_listens_here_alone()
    run.assert_nothing_left()


def as_qwen3(folder: Path) -> None:
    make_qwen3(folder / "model")


def as_experts(folder: Path) -> None:
    make_qwen3_moe(folder / "model")


def as_gpt_oss(folder: Path) -> None:
    as_family_of_the_hub(folder, "gpt_oss")


# tests/e2e/test_targets.py has one of every kind of parallelism, and
# tests/integration/test_layouts.py every layout's update.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "before", "sizes", "others"),
    [
        pytest.param(4, as_qwen3, {"tensor": 2, "pipeline": 2}, {}, id="tp2-pp2"),
        pytest.param(
            2,
            as_experts,
            {"expert": 2},
            {  # weights come and go, too: the reference policy takes their place
                "learner__offload": ["weights", "gradients", "optimizer"],
                "algo__kl__coefficient": 0.01,
                "run__routing_replay": "R3",
                "sampling__top_p": 0.9,
            },
            # Each of them with a real learner: tests/integration/test_{policy,routing_replay}.py
            id="ep2-offload-replay",
        ),
        pytest.param(2, as_qwen3, {"tensor": 2}, {}, id="tp2"),
        pytest.param(2, as_qwen3, {"pipeline": 2}, {}, id="pp2"),
        pytest.param(2, as_qwen3, {"context": 2}, {}, id="cp2"),
        pytest.param(4, as_experts, {"pipeline": 2, "expert": 2}, {}, id="pp2-ep2"),
        # Windows, sinks, biases, the experts of a layer as one tensor, and 4 bits; in `make test`,
        # tests/integration/test_layouts.py has its update.
        pytest.param(
            2, as_gpt_oss, {"context": 2, "expert": 2}, {"run__routing_replay": "R3"}, id="gpt-oss"
        ),
    ],
)
def test_a_learner_of_any_layout_publishes_what_it_learned(
    start_run: Callable[..., TinyRun],
    inputs: Path,
    ranks: int,
    before: Callable[[Path], None],
    sizes: dict[str, int],
    others: dict[str, object],
):
    run = start_run(
        before=before,
        run__steps=3,
        eval__file=inputs / "held_out.jsonl",
        eval__every_steps=3,  # so that the last version is adopted before the run ends
        sampling__temperature=0.6,
        learner__ranks=ranks,
        **{f"learner__{name}_parallel": size for name, size in sizes.items()},
        **others,
    )
    # Replayed experts of older versions' tokens are not those that newer tokens attend to.
    most_versions = 1 if "run__routing_replay" in others else BOUND + 1
    summary = assert_trained_and_served(run, EngineLayout(), most_versions=most_versions)
    assert summary["steps"] == 3
    assert set(summary["versions"]) >= {"torch", "sglang", "megatron-core", "redis"}
    assert summary["busy"]["learner"] > 0


# tests/e2e/test_several_hosts.py has an engine of two ranks that is published to, and
# tests/integration/test_engine_groups.py what its ranks do in collectives.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("transport", "groups", "expert_groups"),
    # In-flight updates of two caches, and routing replay with experts apart, in the last.
    [("collective", 1, 1), ("tcp", 1, 1), ("collective", 2, 1), ("collective", 2, 2)],
)
def test_an_engine_of_two_ranks_serves_what_was_learned(
    start_run: Callable[..., TinyRun], inputs: Path, transport: str, groups: int, expert_groups: int
):
    has_experts = expert_groups > 1
    run = start_run(
        before=as_experts if has_experts else as_qwen3,
        run__routing_replay="R3" if has_experts else "off",
        generators__sglang__tp_size=2,
        generators__sglang__attn_dp_size=groups,
        generators__sglang__ep_size=expert_groups,
        run__steps=3,
        eval__file=inputs / "held_out.jsonl",
        eval__every_steps=3,  # so that the last version is adopted before the run ends
        sampling__temperature=0.6,
        weightbus__transport=transport,
    )
    holder = EngineLayout("cpu", 2, groups, expert_groups)
    # Replayed experts of older versions' tokens are not those that newer tokens attend to.
    summary = assert_trained_and_served(run, holder, most_versions=1 if has_experts else None)
    publishes = summary[PUBLISHES]
    assert summary["steps"] == 3
    assert len(publishes) > 1
    for one in publishes:  # checked tensor by tensor on both ranks before it was committed
        assert (list(one["adopted_by"]), one["failed"]) == (["generator-0"], {})
    assert {one["transports"]["generator-0"] for one in publishes} == {"tcp", transport}


# In `make test` the dense one, tests/integration/test_recurrent_states.py has all of them served.
@pytest.mark.parametrize(
    ("name", "replay"),
    [
        ("qwen3_5", "off"),
        pytest.param("qwen3_5_moe", "R3", marks=pytest.mark.slow),
        pytest.param("qwen3_next", "off", marks=pytest.mark.slow),
    ],
)
def test_an_engine_with_recurrent_states_serves_what_was_learned(
    start_run: Callable[..., TinyRun], inputs: Path, name: str, replay: str
):
    run = start_run(
        before=partial(as_family_of_the_hub, name=name),
        run__routing_replay=replay,
        run__steps=3,
        eval__file=inputs / "held_out.jsonl",
        eval__every_steps=3,  # so that the last version is adopted before the run ends
    )
    most_versions = 1 if replay == "R3" else None
    summary = assert_trained_and_served(run, EngineLayout(), most_versions=most_versions)
    assert len(summary[PUBLISHES]) > 1
    exported = load_file(run.folder / "model" / "model.safetensors")
    given = load_file(inputs / "model" / "model.safetensors")
    assert exported.keys() == given.keys()
    kept = [name for name in given if name.startswith(("model.visual.", "mtp."))]
    assert len(kept) == (2 if name.startswith("qwen3_5") else 0)
    assert all(exported[name].equal(given[name]) for name in kept)


# CPUs have no kernels for fp8: what the engine computes is emulated, what it holds is not.
@pytest.mark.parametrize(
    ("experts", "ranks"),
    [
        pytest.param(False, 1, id="dense"),
        pytest.param(False, 2, id="dense-tp2", marks=pytest.mark.slow),
        pytest.param(True, 2, id="experts-ep2", marks=pytest.mark.slow),
    ],
)
def test_an_engine_in_fp8_serves_what_was_learned(
    start_run: Callable[..., TinyRun], inputs: Path, experts: bool, ranks: int
):
    divided = "expert" if experts else "tensor"
    expert_groups = ranks if experts else 1
    run = start_run(
        before=lambda folder: with_whole_blocks(folder / "model", experts=experts),
        weightbus__precision="fp8",
        learner__ranks=ranks,
        **{f"learner__{divided}_parallel": ranks},
        generators__sglang__tp_size=ranks,
        generators__sglang__ep_size=expert_groups,
        run__steps=3,
        eval__file=inputs / "held_out.jsonl",
        eval__every_steps=3,  # so that the last version is adopted before the run ends
        run__routing_replay="R3" if experts else "off",
    )
    holder = EngineLayout("cpu", ranks, expert_groups=expert_groups)
    summary = assert_trained_and_served(run, holder, is_fp8=True)
    rows = map(json.loads, (run.folder / "metrics.jsonl").read_text().splitlines())
    step = [row for row in rows if row.get("staleness/ess@lag0")][-1]
    assert 0 < step["staleness/mismatch_kl@lag0"] < 0.02
    assert 0.95 < step["staleness/ess@lag0"] < 1
    final = run.folder / "model" / "model.safetensors"
    assert summary["last_publish"]["num_bytes"] < 0.5 * final.stat().st_size
