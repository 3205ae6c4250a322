"""Every row: its settings exist, its keys are reached, and its rules keep to it."""

from collections import Counter

import msgspec
import pytest

from docs.generate.settings import SECTION_STRUCTS, rows
from slipstream.algos.choice import (
    CriticOptions,
    DataOptions,
    KlOptions,
    ReduceOptions,
    TeacherOptions,
)
from slipstream.algos.config import PARTS
from slipstream.deploy.interop.verl.hydra import HydraSettings, Value, overrides_of, parsed
from slipstream.deploy.interop.verl.keys import VerlKeys
from slipstream.deploy.interop.verl.rows import KeyRow, fits
from slipstream.deploy.interop.verl.table import REMARKS_ON_VALUES, ROWS, TOPICS, row_of
from slipstream.deploy.interop.verl.topics.algorithm import ADVANTAGES
from slipstream.deploy.interop.verl.topics.loss import ESTIMATORS, SURROGATES
from slipstream.deploy.interop.verl.translate import translate
from tests.golden.make_verl import CASES, FOLDER, translated
from tests.support.verl_keys import COMMON, DAPO, GRPO, MEGATRON, PPO, configuration, words

FREE = ("reward.options", "learner.megatron", "generators.sglang", "sampling.chat_template_kwargs")
TABLES = {"kl": KlOptions, "critic": CriticOptions, "data": DataOptions, "reduce": ReduceOptions}
TABLES |= {"teacher": TeacherOptions}
OF_TOPICS = [row for topic in TOPICS for row in topic.rows]


def known_settings() -> set[str]:
    """Return every setting that a file may have, with NAME where a name is free."""
    names = {row[0] for name, (struct, _) in SECTION_STRUCTS.items() for row in rows(struct, name)}
    for kind, parts in PARTS.items():
        names |= {f"algo.{kind}.name"} if kind != "correction" else set()
        for part in parts.values():
            where = f"algo.{kind}.{part.name}" if kind == "correction" else f"algo.{kind}"
            names |= {row[0] for row in rows(part.options, where)}
    for name, struct in TABLES.items():
        names |= {row[0] for row in rows(struct, f"algo.{name}")}
    return names


ACTOR, CORRECTION = "actor_rollout_ref.actor", "algorithm.rollout_correction"
KNOWN = known_settings()


@pytest.mark.parametrize("row", OF_TOPICS, ids=lambda row: row.verl[0])
def test_every_setting_of_a_row_exists(row: KeyRow):
    for name in row.ours:
        if name.startswith(FREE):
            assert name.rpartition(".")[0] in FREE or name.count(".") == 2
            assert ".".join(name.split(".")[:2]) in KNOWN
        elif name.endswith(".*"):
            assert any(known.startswith(name[:-1]) for known in KNOWN), name
        else:
            assert name.replace("*", "NAME") in KNOWN, name


@pytest.mark.parametrize("row", OF_TOPICS, ids=lambda row: row.verl[0])
def test_every_row_says_what_it_does(row: KeyRow):
    assert row.rule is not None or row.remark, "without a counterpart there is a reason"
    assert row.rule is not None or not row.ours
    assert row.verl


def test_every_key_is_in_one_row_and_is_found_there():
    keys = [key for row in OF_TOPICS for key in row.verl]
    assert [key for key, count in Counter(keys).items() if count > 1] == []
    for row in OF_TOPICS:
        for key in row.verl:
            if "*" not in key:
                found = row_of(key)
                assert found is row, f"{key} is taken by the row of {found and found.verl[0]}"


def test_a_star_is_one_name_and_two_are_any_number():
    assert fits("a.*.c", "a.b.c")
    assert not fits("a.*.c", "a.b.b.c")
    assert fits("a.**", "a.b.c")
    assert fits("a.**", "a.b")
    assert not fits("a.**", "a")
    assert not fits("a", "a.b")


ODD = (
    "True",
    "0",
    "-1",
    "1.5",
    "inf",
    "nan",
    "''",
    "x",
    "1_inf",
    "[]",
    "[a,1]",
    "[[1]]",
    "{a: {}}",
)


@pytest.mark.parametrize("value", ODD)
def test_no_value_is_an_error_of_ours(value: str):
    others: dict[str, Value] = {
        f"{CORRECTION}.rollout_rs": "seq_sum_k1",
        f"{ACTOR}.policy_loss.loss_mode": "dro",
        "trainer.total_training_steps": 10,
    }
    given = parsed(value)
    for row in OF_TOPICS:
        for key in row.verl:
            row.counterpart(key, given, VerlKeys({**others, key: given}))
    for key in ("trainer.n_gpus_per_node", "trainer.nnodes", "data.train_batch_size"):
        translate(HydraSettings({key: given}))
    translate(HydraSettings(dict.fromkeys((key for row in OF_TOPICS for key in row.verl), given)))


def test_every_key_of_verls_examples_is_known_and_kept_to_its_row():
    for groups in [(GRPO,), (GRPO, MEGATRON), (DAPO,), (DAPO, MEGATRON), (PPO,), (PPO, MEGATRON)]:
        given = overrides_of(words(COMMON, *groups))
        found = translate(given)
        assert [(one.key, one.remark) for one in found.failed] == []
        assert {one.key for one in found.keys} >= set(given.values)
        for one in found.keys:
            if one.key not in given.values or (one.value is None and one.kind == "changed"):
                continue
            row = row_of(one.key)
            assert row is not None
            judged = one.value is None
            assert judged or all(any(fits(p, s) for p in row.ours) for s in one.settings), one


@pytest.mark.parametrize("name", CASES)
def test_examples_are_translated_as_they_were(name: str):
    assert translated(name) == (FOLDER / f"{name}.txt").read_text(), (
        "if that is meant: python -m tests.golden.make_verl"
    )


def test_every_key_of_verls_whole_configuration_is_known():
    assert len(configuration()) > 500
    assert [key for key in configuration() if row_of(key) is None] == []


def test_remarks_on_values_are_of_values_there_are():
    assert set(REMARKS_ON_VALUES) <= {*ADVANTAGES, *SURROGATES, *ESTIMATORS}


def test_defaults_are_of_rows_with_a_rule():
    with_default = [row for row in ROWS if row.default != "\0not set"]
    assert len(with_default) > 20
    assert all(row.rule is not None for row in with_default)


def test_the_report_is_plain_data_for_programs():
    found = translate(overrides_of(["data.shuffle=False", "a.b=1"]))
    assert msgspec.json.decode(msgspec.json.encode(found.keys))[0] == {
        "key": "data.shuffle",
        "kind": "kept",
        "value": False,
        "settings": {"data.shuffle": False},
        "remark": "",
        "is_default": False,
    }
