"""What `slipstream simulate` prints, refuses, and writes for the tools of ended runs."""

import argparse
import json
from itertools import pairwise
from pathlib import Path

import pytest

from slipstream.broker.history.columns import read_state
from slipstream.deploy.commands import simulate
from slipstream.deploy.commands.options import take_config
from slipstream.deploy.predict.simulate.lengths import Fixed, Recorded
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.run_folder import METRICS, PAGE_STATE, SETTINGS, SUMMARY
from tests.support.recorded_runs import a_scenario, recorded

SETTINGS_TEXT = """
[run]
model = "none"
groups_per_step = 8
group_size = 4
steps = 12
max_staleness_steps = 3
[data]
file = "train.jsonl"
[sampling]
max_prompt_tokens = 256
max_response_tokens = 1024
[generators]
count = 3
max_sequences = 32
"""
WORDS = ("--model", "Qwen3-30B-A3B", "--gpu", "H100", "--gpus-per-engine", "2")


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(SETTINGS_TEXT)
    return path


def arguments(settings: Path, *words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    simulate.add_arguments(parser)
    found = parser.parse_args([*WORDS, *words, str(settings)])
    take_config(parser, found)
    return found


def predicted(settings: Path, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, float]:
    assert simulate.main(arguments(settings, "--json", *words)) == 0
    found: dict[str, float] = json.loads(capsys.readouterr().out)
    return found


def test_it_says_that_all_of_it_is_predicted(settings: Path, capsys: pytest.CaptureFixture[str]):
    assert simulate.main(arguments(settings)) == 0
    printed = capsys.readouterr().out
    assert "predicted, not measured" in printed
    assert "bound 3" in printed


def test_more_engines_help_a_learner_that_waits(settings: Path, capsys: pytest.CaptureFixture[str]):
    few = predicted(settings, capsys, "--engines", "1", "--learner-gpus", "8")
    many = predicted(settings, capsys, "--engines", "4", "--learner-gpus", "8")
    assert few["learner_waits"] > many["learner_waits"]
    assert few["step_s"] > many["step_s"]
    assert few["unaccounted"] == many["unaccounted"] == 0
    assert (few["trained"], many["trained"]) == (96, 96)


def test_a_staleness_target_of_the_settings_is_held(
    settings: Path, capsys: pytest.CaptureFixture[str]
):
    slow = ("--mfu", "0.001", "--steps", "60", "--spread", "0")
    settings.write_text(SETTINGS_TEXT.replace("[data]", "staleness_target.p95_lag = 1\n[data]"))
    held = predicted(settings, capsys, *slow)
    settings.write_text(SETTINGS_TEXT)
    free = predicted(settings, capsys, *slow)
    assert free["mean_staleness"] > 2
    assert held["mean_staleness"] < 1.7


def test_failures_are_told(settings: Path, capsys: pytest.CaptureFixture[str]):
    assert predicted(settings, capsys, "--engine-mtbf-h", "0.005")["restarted_trajectories"] > 0


def test_the_run_folder_is_read_by_the_tools_of_ended_runs(settings: Path, tmp_path: Path):
    out = tmp_path / "a b" / "predicted"
    assert simulate.main(arguments(settings, "--out", str(out))) == 0
    lines = [json.loads(line) for line in (out / METRICS).read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert all(a["wall_s"] <= b["wall_s"] for a, b in pairwise(lines))
    assert lines[-1]["trained_tokens"] > 0
    summary = json.loads((out / SUMMARY).read_text())
    assert summary["outcome"] == "simulated"
    assert summary["unaccounted"] == 0
    assert (out / SETTINGS).is_file()
    state = read_state(out / PAGE_STATE)
    assert state is not None
    assert state.history.steps.step[-1] == 12
    assert {role.name for role in state.status.roles} >= {"learner", "generator-0", "generator-2"}
    with pytest.raises(ConfigError, match="not empty"):
        simulate.main(arguments(settings, "--out", str(out)))


def test_numbers_that_are_none_are_refused(settings: Path):
    for words, why in [
        (("--mfu", "0"), "--mfu is 0"),
        (("--nic-gb-s", "0"), "--nic-gb-s is 0"),
        (("--engine-mtbf-h", "-1"), "--engine-mtbf-h is -1"),
        (("run.staleness_target.mismatch_kl=0.1",), "--kl-per-lag"),
        (("--engines", "0"), "--engines is 0"),
        (("--gpu", "H9000"), "--gpu is 'H9000'"),
        (("--mean-response", "5000"), "--mean-response is 5000"),
        (("--gpu", "L4", "--gpus-per-engine", "1"), "do not hold"),
        (("--useless-share", "1.5"), "--useless-share is 1.5"),
        (("--publish-every", "5"), "publish_every is 5"),
        (("--like", "/nowhere"), "nowhere"),
    ]:
        with pytest.raises(ConfigError, match=why):
            simulate.main(arguments(settings, *words))


def test_rewards_that_wait_useless_groups_and_rare_publishes_cost_steps(
    settings: Path, capsys: pytest.CaptureFixture[str]
):
    plain = predicted(settings, capsys)
    late = predicted(settings, capsys, "--reward-s", "600")
    assert late["group_s_p50"] > plain["group_s_p50"] + 590
    useless = predicted(settings, capsys, "--useless-share", "0.5")
    assert useless["dropped"]["zero_variance"] > 20  # type: ignore[index]
    assert useless["step_s"] > 1.3 * plain["step_s"]
    wide = ("--gpus-per-engine", "8")  # loads a version in a quarter of the time
    rare = predicted(settings, capsys, *wide, "--publish-every", "4")
    assert rare["step_s"] > predicted(settings, capsys, *wide)["step_s"]


def test_the_passes_of_a_step_are_those_of_the_settings(settings: Path):
    def token_s(*words: str) -> float:
        _, scenario = simulate.asked_of(arguments(settings, *words))
        return scenario.learner.token_s

    once = token_s()
    assert token_s("learner.minibatches=2") == pytest.approx(4 / 3 * once)
    assert token_s("learner.recompute=full") == pytest.approx(4 / 3 * once)
    assert token_s("--passes", "1", "learner.minibatches=2") == pytest.approx(once)


def test_a_run_lends_its_lengths(settings: Path, monkeypatch: pytest.MonkeyPatch):
    record = recorded(a_scenario(score_s=7.0))
    monkeypatch.setattr(simulate, "record_of", lambda _folder: record)
    _, scenario = simulate.asked_of(arguments(settings, "--like", "a run"))
    assert isinstance(scenario.lengths, Recorded)
    assert (scenario.prompt_tokens, scenario.score_s) == (40, 7.0)
    words = ("--like", "a run", "--spread", "0", "--reward-s", "0")
    _, scenario = simulate.asked_of(arguments(settings, *words))
    assert scenario.score_s == 0
    assert scenario.lengths == Fixed(round(record.mean_tokens))
    words = ("--like", "a run", "sampling.max_response_tokens=50")
    _, scenario = simulate.asked_of(arguments(settings, *words))
    assert isinstance(scenario.lengths, Recorded)
    assert max(scenario.lengths.tokens) == 50


def test_a_cache_that_is_too_small_is_told(settings: Path, capsys: pytest.CaptureFixture[str]):
    tight = ("--gpus-per-engine", "1", "--engines", "1", "generators.max_sequences=4000")
    words = (*tight[:4], "--steps", "6", tight[4], "run.groups_per_step=200", "run.group_size=8")
    assert simulate.main(arguments(settings, *words)) == 0
    assert "by a full cache" in capsys.readouterr().out


def test_without_torch_the_passes_of_other_policies_are_not_counted_and_that_is_said(
    settings: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def missing(_config: object) -> None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(simulate, "policies_beside", missing)
    assert simulate.main(arguments(settings, "--json")) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["step_s"] > 0
    assert printed.err.startswith("torch is not installed: passes of a reference")
    assert simulate.main(arguments(settings, "--passes", "1")) == 0
    assert not capsys.readouterr().err
