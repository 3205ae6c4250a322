"""Overrides of a command, and a YAML file, as keys and values."""

import pytest

from slipstream.deploy.interop.verl.hydra import after_program, of_file, overrides_of, parsed
from slipstream.wire.errors import ConfigError


def test_values():
    for text, value in [
        ("1024", 1024),
        ("-1", -1),
        ("1_000", 1000),
        ("1e-6", 1e-6),
        ("0.", 0.0),
        (".5", 0.5),
        ("True", True),
        ("false", False),
        ("null", None),
        ("None", None),
        ("''", ""),
        ("'error'", "error"),
        ('"1"', "1"),
        ("gsm8k/train.parquet", "gsm8k/train.parquet"),
        ("0.99_1.01", "0.99_1.01"),
        ("['console','wandb']", ["console", "wandb"]),
        ('["console", "wandb"]', ["console", "wandb"]),
        ("[0.9,0.95]", [0.9, 0.95]),
        ("[]", []),
        ("[a, [1, 2]]", ["a", [1, 2]]),
        ("{a: 1, b: x}", {"a": 1, "b": "x"}),
        ("2026-11-26 run", "2026-11-26 run"),
        ("a=b", "a=b"),
    ]:
        assert parsed(text) == value


def test_overrides():
    given = overrides_of(
        ["a.b=1", "+c=x", "++d.e={f: 2, g: 3}", "~h", "i=1", "~i", "--config-name=m", "-cn", "n"]
    )
    assert given.values == {
        "a.b": 1,
        "c": "x",
        "d.e.f": 2,
        "d.e.g": 3,
        "--config-name": "m",
        "-cn": "n",
    }
    assert given.deleted == ("h", "i")


def test_the_last_value_of_a_key_counts():
    assert overrides_of(["a=1", "a=2"]).values == {"a": 2}


@pytest.mark.parametrize("word", ["data.train_files", "=1", "run.sh", "a b=1"])
def test_a_word_that_sets_nothing_is_refused_with_an_example(word: str):
    with pytest.raises(ConfigError, match=r"is no setting of verl.*data.train_batch_size=1024"):
        overrides_of([word])


def test_the_words_after_the_program():
    for command in [
        "python3 -m verl.trainer.main_ppo a=1",
        "ray job submit --working-dir . -- python3 -m recipe.dapo.main_dapo a=1",
        "torchrun verl/trainer/main_ppo.py a=1",
        "python -m verl.trainer.main_ppo_sync a=1",
    ]:
        assert after_program(command.split()) == ["a=1"]


def test_another_program_is_none_of_verl():
    assert after_program(["python3", "-m", "pip", "install", "verl"]) is None


def test_a_file_is_flattened_and_its_defaults_are_told():
    given = of_file(
        {
            "defaults": ["actor"],
            "data": {"train_files": ["a", "b"], "seed": None, "kwargs": {}},
            "critic": {"lr": "${actor.lr}"},
        },
        "x.yaml",
    )
    assert given.values == {"data.train_files": ["a", "b"], "data.seed": None, "data.kwargs": {}}
    assert given.remarks[0].startswith("defaults: ")
    assert "1 values are references (${...}), such as that of critic.lr" in given.remarks[1]


@pytest.mark.parametrize("tree", [None, [1], "x"])
def test_a_file_without_keys_is_refused(tree: object):
    with pytest.raises(ConfigError, match=r"x.yaml holds no table of settings"):
        of_file(tree, "x.yaml")


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("[" * 3_000 + "]" * 3_000, "a.b: brackets are more than 40 deep"),
        ("{x:" * 3_000 + "}" * 3_000, "a.b: brackets are more than 40 deep"),
        ("[" + "1," * 200_000 + "]", "a.b: 400002 characters are no value: 65536 at most"),
    ],
)
def test_a_value_beyond_a_bound_is_refused_with_its_key(value: str, why: str):
    with pytest.raises(ConfigError, match=why):
        overrides_of([f"a.b={value}"])


def test_what_only_looks_like_a_number_is_text():
    assert [parsed(text) for text in ("1_0", "1__0", "1__0.5", "1" * 5_000)] == [
        10,
        "1__0",
        "1__0.5",
        "1" * 5_000,
    ]
