"""Every role as a process of its own: SGLang, megatron-core, a Redis-compatible server."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from slipstream.broker.report.summary import PUBLISHES
from slipstream.weightbus.version.engine_checksums import Holder, digest_of, expected_checksums
from tests.support.families import write_family
from tests.support.random_llama import make_qwen3, make_qwen3_moe
from tests.support.tiny_run import TinyRun

pytestmark = [pytest.mark.e2e]
BOUND = 2
SAME = 1e-4  # nats; float32 noise between two implementations is about 1e-6


def assert_trained_and_served(
    run: TinyRun, holder: Holder, *, most_versions: int = BOUND + 1
) -> dict[str, Any]:
    """Wait for a run of three steps whose one engine holds what was learned; return its summary."""
    assert run.wait() == 0, run.output
    summary = run.summary()
    assert summary["trained"] == 12
    assert summary["equation"]["unaccounted"] == 0
    final = load_file(run.folder / "model" / "model.safetensors")
    expected = digest_of(expected_checksums(final, holder))
    assert summary["last_publish"]["engine_digests"] == {"generator-0": expected}
    fresh = [one for lag, one in run.differences(most_versions=most_versions) if lag == 0]
    assert fresh, "no answer was trained by the step of its own version"
    assert max(fresh) < SAME
    run.assert_listens_here_alone()
    run.assert_nothing_left()
    return summary


@pytest.mark.parametrize(
    ("transport", "temperature", "lr"),
    [
        ("collective", 1.0, 1e-3),
        # tests/integration/test_transports.py has every transport with a real engine.
        pytest.param("tcp", 1.0, 1e-3, marks=pytest.mark.slow),
        pytest.param("disk", 1.0, 1e-3, marks=pytest.mark.slow),
        # The layouts below compare at temperature 0.6 too.
        pytest.param("collective", 0.6, 0.0, marks=pytest.mark.slow),
    ],
)
def test_publishes_land_in_long_generations_and_every_token_keeps_its_policy(
    start_run: Callable[..., TinyRun], inputs: Path, transport: str, temperature: float, lr: float
):
    run = start_run(
        run__steps=6,
        run__groups_per_step=2,
        run__max_staleness_steps=BOUND,
        sampling__temperature=temperature,
        sampling__min_response_tokens=400,
        sampling__max_response_tokens=440,
        generators__max_sequences=2,  # one group at a time: engines are always in mid-answer
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
        assert len(row["token_ids"]) - row["num_prompt_tokens"] >= 400
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
    assert publish["version"] == [1, 6]
    assert set(publish["transports"].values()) == {transport}
    assert publish["engine_digests"] == {"generator-0": expected, "generator-1": expected}
    assert summary["eval"][0]["overall"]["num_answers"] == 64
    run.assert_listens_here_alone()
    run.assert_nothing_left()


def as_qwen3(folder: Path) -> None:
    make_qwen3(folder / "model")


def as_experts(folder: Path) -> None:
    make_qwen3_moe(folder / "model")


def as_deepseek(folder: Path) -> None:
    """Make the policy a DeepSeek-V3 of the same tokens."""
    model = folder / "model"
    known = json.loads((model / "config.json").read_text())
    same = ("vocab_size", "max_position_embeddings", "bos_token_id", "eos_token_id")
    write_family(folder / "made", "deepseek_v3", **{key: known[key] for key in same})
    for name in ("config.json", "model.safetensors"):
        (folder / "made" / name).replace(model / name)


@pytest.mark.parametrize(
    ("ranks", "before", "sizes", "others"),
    [
        # tests/integration/test_layouts.py has every layout's update.
        # Latent attention, experts behind a router with a bias, a dense layer before them.
        pytest.param(
            4,
            as_deepseek,
            {"tensor": 2, "pipeline": 2, "expert": 2},
            {},
            id="deepseek_v3-tp2-pp2-ep2",
        ),
        pytest.param(
            4, as_qwen3, {"tensor": 2, "pipeline": 2}, {}, id="tp2-pp2", marks=pytest.mark.slow
        ),
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
            id="ep2-offload-replay",
            # Each of them with a real learner: tests/integration/test_{policy,routing_replay}.py
            marks=pytest.mark.slow,
        ),
        pytest.param(2, as_qwen3, {"tensor": 2}, {}, id="tp2", marks=pytest.mark.slow),
        pytest.param(2, as_qwen3, {"pipeline": 2}, {}, id="pp2", marks=pytest.mark.slow),
        pytest.param(2, as_qwen3, {"context": 2}, {}, id="cp2", marks=pytest.mark.slow),
        pytest.param(
            4, as_experts, {"pipeline": 2, "expert": 2}, {}, id="pp2-ep2", marks=pytest.mark.slow
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
        generators__count=1,
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
    summary = assert_trained_and_served(run, Holder(), most_versions=most_versions)
    assert summary["last_publish"]["version"] == [1, 3]
    assert set(summary["versions"]) >= {"torch", "sglang", "megatron-core", "redis"}
    assert summary["busy"]["learner"] > 0


@pytest.mark.parametrize(
    ("transport", "groups"),
    [
        ("collective", 1),
        pytest.param("tcp", 1, marks=pytest.mark.slow),
        pytest.param("collective", 2, marks=pytest.mark.slow),  # attention is data-parallel
    ],
)
def test_an_engine_of_two_ranks_serves_what_was_learned(
    start_run: Callable[..., TinyRun], inputs: Path, transport: str, groups: int
):
    run = start_run(
        before=as_qwen3,
        generators__sglang__tp_size=2,
        generators__sglang__attn_dp_size=groups,
        generators__count=1,
        run__steps=3,
        eval__file=inputs / "held_out.jsonl",
        eval__every_steps=3,  # so that the last version is adopted before the run ends
        sampling__temperature=0.6,
        weightbus__transport=transport,
    )
    publishes = assert_trained_and_served(run, Holder("cpu", 2, groups))[PUBLISHES]
    assert len(publishes) > 1
    for one in publishes:  # checked tensor by tensor on both ranks before it was committed
        assert (list(one["adopted_by"]), one["failed"]) == (["generator-0"], {})
    assert {one["transports"]["generator-0"] for one in publishes} == {"tcp", transport}
