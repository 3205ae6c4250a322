"""Published runs as scenarios: the data is whole, fits are solved, losing runs lose by the laws."""

import msgspec
import pytest

from benchmarks.scale.calibration import (
    DEFAULTS,
    Row,
    System,
    fit,
    predict,
    scenario_of,
    shape,
    solved,
    systems,
)

TURNS = Row(
    name="by turns",
    role="fit",
    gpu="H100",
    gpus=16,
    model="Qwen2.5-7B",
    prompts=16,
    samples=8,
    mean_total=1000,
    longest_total=4000,
    engine_ranks=2,
    step_s=60.0,
    generate_s=24.0,
)
APART = msgspec.structs.replace(
    TURNS, name="apart", role="predict", generate_gpus=8, staleness=1.0, generate_s=None
)
SYSTEM = System(
    name="a system",
    sources=["none"],
    unknown=[],
    rows=[TURNS, APART],
    prompt_tokens=100,
    passes=4 / 3,
    update_samples=64,
    searched={"layer_s": (2e-5, 2e-3)},
)


def test_every_system_says_its_sources_and_what_is_unknown_and_has_unique_rows():
    for name, system in systems().items():
        assert system.sources, name
        assert system.unknown, name
        names = [row.name for row in system.rows]
        assert len(set(names)) == len(names), name
        for row in system.rows:
            assert row.loses_to in {"", *names}
            assert row.less in {"", *names}
            assert shape(row.model).num_parameters > 1e8


def test_every_row_is_a_scenario_with_what_was_fitted():
    for system in systems().values():
        assert set(system.searched) <= set(system.fitted), system.name
        for row in system.rows:
            scenario = scenario_of(system, row, system.parameters)
            assert scenario.groups_per_step * row.pieces == pytest.approx(row.prompts, rel=0.01)
            assert (scenario.max_staleness_steps == 0) == (not row.staleness and row.pieces == 1)


def test_an_asynchronous_run_publishes_after_its_pieces_and_may_be_ahead_by_its_threshold():
    row = msgspec.structs.replace(APART, staleness=0.5, pieces=4)
    scenario = scenario_of(SYSTEM, row, {**DEFAULTS, row.mfu_key: 0.3})
    assert scenario.publish_every == 4
    assert scenario.max_staleness_steps == 3 + 2


def test_a_fit_finds_what_the_published_seconds_are_made_of():
    found = fit(SYSTEM)
    told = predict(SYSTEM, TURNS, {**DEFAULTS, **found})
    assert told.step_s == pytest.approx(60.0, rel=0.03)
    assert told.generate_s == pytest.approx(24.0, rel=0.05)


def test_a_share_of_the_peak_is_solved_for_exactly():
    mfus, _ = solved(SYSTEM, {"layer_s": 1e-4})
    told = predict(SYSTEM, TURNS, {**DEFAULTS, **mfus, "layer_s": 1e-4}, measured=2)
    assert told.step_s == pytest.approx(60.0, rel=1e-6)


def test_half_of_the_gpus_are_slower_where_the_learner_is_most_of_the_step():
    parameters = {**DEFAULTS, TURNS.mfu_key: 0.008}
    together, apart = (predict(SYSTEM, row, parameters) for row in (TURNS, APART))
    assert together.train_s > together.generate_s * 2
    assert apart.step_s > together.step_s
    balanced = {**DEFAULTS, TURNS.mfu_key: 0.4, "layer_s": 5e-4}
    together, apart = (predict(SYSTEM, row, balanced) for row in (TURNS, APART))
    assert apart.step_s < together.step_s


def test_a_pause_longer_than_what_is_hidden_makes_an_asynchronous_run_slower():
    marin = systems()["marin"]
    slower = next(row for row in marin.rows if row.less)
    assert predict(marin, slower, marin.parameters).step_s > 0
    quick = msgspec.structs.replace(slower, publish_s=2.44)
    assert predict(marin, quick, marin.parameters).step_s < 0


def test_stages_that_wait_for_each_other_take_longer():
    row = msgspec.structs.replace(TURNS, stages=4)
    parameters = {**DEFAULTS, TURNS.mfu_key: 0.3}
    flat = scenario_of(SYSTEM, TURNS, parameters).learner
    staged = scenario_of(SYSTEM, row, parameters).learner
    # 64 x 1000 / 4000 tokens of an update over 16 / 4 replicas are 4 microbatches.
    assert staged.token_s == pytest.approx(flat.token_s * (1 + 3 / 4))


def test_a_fit_is_the_same_each_time_whatever_is_stored():
    few = msgspec.structs.replace(SYSTEM, trials=6)
    stored = msgspec.structs.replace(few, fitted={"layer_s": 1.9e-3})
    assert fit(few) == fit(stored)


def test_what_is_stored_is_what_the_fit_finds():
    marin = systems()["marin"]
    assert fit(marin) == pytest.approx(dict(marin.fitted), rel=1e-3)


def test_experts_on_other_nodes_cost_the_learner_messages_over_nics():
    row = msgspec.structs.replace(
        TURNS, gpu="GB200", gpus=64, model="Qwen3-30B-A3B", expert_ranks=16, engine_ranks=8
    )
    parameters = {**DEFAULTS, row.mfu_key: 0.3}

    def seconds(**changes: object) -> tuple[float, float]:
        changed = msgspec.structs.replace(row, **changes)
        found = scenario_of(SYSTEM, changed, parameters)
        gpus = changed.gpus
        return found.learner.token_s * gpus, found.engine.base_s

    alone, base_s = seconds(expert_ranks=1)
    near, _ = seconds()
    # Dispatch and combine of 8 copies of 2,048 channels in 48 layers: forward, backward, forward.
    sent = 2 * 3 * 2 * 2048 * 8 * 48 * 15 / 16
    assert near - alone == pytest.approx(sent / 900e9)
    # One rack of 72 does not hold 128: only the 4 GPUs of a node are sure to be near.
    far, far_base_s = seconds(gpus=128)
    assert far - alone == pytest.approx(sent * (0.25 / 900e9 + 0.75 / 50e9))
    assert far_base_s == pytest.approx(base_s + 48 * DEFAULTS["network_s"])
    # A part of such a run is as far apart.
    assert seconds(gpus=32, part_of_gpus=128)[0] == pytest.approx(far)
