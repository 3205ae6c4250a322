"""What `slipstream plan` prints, and what it refuses."""

import argparse
import json
from pathlib import Path

import pytest

from slipstream.deploy.commands.plan import command, sizing
from slipstream.wire.errors import ConfigError

SETTINGS = """
[run]
model = "none"
groups_per_step = 32
group_size = 8
[data]
file = "train.jsonl"
[sampling]
max_prompt_tokens = 1024
max_response_tokens = 3072
"""
MODEL = ("--model", "Qwen3-30B-A3B")


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(SETTINGS)
    return path


def arguments(settings: Path, *words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    parser.set_defaults(parser=parser)
    return parser.parse_args([*words, "--config", str(settings)])


def test_it_says_what_fits_and_how_to_split(
    settings: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "100")
    assert command.main(arguments(settings, *MODEL, "--gpu", "H100", "--gpus", "16")) == 0
    printed = capsys.readouterr().out
    assert "parameters: 30,532,122,624" in printed
    assert "does NOT fit in 76" in printed  # one rank for all, as the file has it
    assert "the fewest GPUs first: 3 at least" in printed
    assert max(map(len, printed.splitlines())) <= 100
    asked = sizing.asked_of(arguments(settings, *MODEL, "--gpu", "H100", "--gpus", "16"))
    lines = sizing.settings_lines(sizing.answer(asked).splits[0])
    assert all(line in printed for line in lines)


def test_the_settings_that_it_names_can_be_used(settings: Path):
    found = arguments(settings, *MODEL, "--gpus", "16")
    lines = sizing.settings_lines(sizing.answer(sizing.asked_of(found)).splits[0])
    again = [line.replace(" = ", "=") for line in lines]
    asked = sizing.asked_of(arguments(settings, *MODEL, *again))
    assert asked.gpus <= 16


def test_json_has_numbers_with_their_laws(settings: Path, capsys: pytest.CaptureFixture[str]):
    assert command.main(arguments(settings, *MODEL, "--gpus", "16", "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"][0]["value"] == 30_532_122_624
    assert found["fewest_learner_gpus"] == min(one["gpus"] for one in found["layouts"])
    for one in [*found["learner_memory"], *found["layouts"][0]["step"]]:
        assert one["formula"]
    hours = [one["steps_per_hour"] for one in found["splits"]]
    assert hours[0] >= 0.98 * max(hours)


def test_what_cannot_be_planned_is_refused_by_its_option(settings: Path):
    for words, told in [
        (("--gpu", "H1000"), r"--gpu is 'H1000': expected A100"),
        (("--gpus", "0"), r"--gpus is 0: expected a number above 0"),
        (("--gpus", "1"), r"--gpus is 1: one engine takes 1"),
        (("--gpus", "2"), r"--gpus is 2: no layout of the learner fits"),
        (("--mfu", "1.5"), r"--mfu is 1.5: expected a number of at most 1 above 0"),
        (("--nic-gb-s", "nan"), r"--nic-gb-s is nan"),
        (("--reserve-gib", "90"), r"--reserve-gib is 90: expected less than the 80 GiB"),
        (("--mean-response", "5000"), r"--mean-response is 5000: expected at most 3,072"),
    ]:
        with pytest.raises(ConfigError, match=told):
            command.main(arguments(settings, *MODEL, *words))


def test_a_model_without_a_config_is_refused(settings: Path):
    with pytest.raises(ConfigError, match=r"no config.json in none: .* \(run.model\)"):
        command.main(arguments(settings))
    with pytest.raises(ConfigError, match=r"--model is 'nowhere'"):
        command.main(arguments(settings, "--model", "nowhere"))


def test_the_file_may_be_among_the_words(settings: Path, capsys: pytest.CaptureFixture[str]):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    parser.set_defaults(parser=parser)
    words = [str(settings), "--gpus", "16", *MODEL, "--json"]
    assert command.main(parser.parse_args(words)) == 0
    assert json.loads(capsys.readouterr().out)["gpus"] == 16


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--publish --gpus 4", "--gpus goes with slipstream plan, and is not read with --publish"),
        ("run.toml --memory --gpus 4", "--gpus goes with slipstream plan, .* with --memory"),
        (
            "run.toml --measure --nics 2",
            "--nics goes with slipstream plan or slipstream plan --pub",
        ),
        ("run.toml --advise", "run.toml goes with slipstream plan or .*, and is not .* --advise"),
        (
            "--advise --json --model x",
            "--model goes with .*--measure, and is not read with --advise",
        ),
        (
            "run.toml --version-gb 3",
            "--version-gb goes with slipstream plan --publish, and nothing else reads it",
        ),
    ],
)
def test_what_belongs_to_another_subject_is_refused(words: str, reason: str):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    parser.set_defaults(parser=parser)
    with pytest.raises(ConfigError, match=reason):
        command.main(parser.parse_args(words.split()))


def test_every_option_belongs_to_a_subject():
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    subjects = {"memory", "measure", "publish", "advise"}
    read = frozenset[str]().union(*command._READS.values())
    assert read == vars(parser.parse_args([])).keys() - subjects - {"json", "needs_config"}
