from pathlib import Path
from typing import Any

import pytest

from slipstream.generators.nodes.card import facts_of
from slipstream.wire.process.cards import difference
from tests.support.blank_model import write_blank_model
from tests.support.generator_settings import generator_settings_of


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Return the folders of a model, of a copy of it, and of another one."""
    folders = [tmp_path_factory.mktemp("model") for _ in range(3)]
    for folder, layers in zip(folders, (1, 1, 2), strict=True):
        write_blank_model(folder, hidden=16, layers=layers)
    return folders[0], folders[1], folders[2]


def facts(model: Path, name: str = "generator-0", **sections: dict[str, Any]) -> dict[str, str]:
    generators = {"nodes": 2, "sglang": {"tp_size": 2}} | sections.pop("generators", {})
    return facts_of(generator_settings_of(model, generators=generators, **sections), name)


def test_nodes_of_one_engine_have_all_in_common_wherever_the_model_is(
    models: tuple[Path, Path, Path],
):
    here, there, _ = models
    ours = facts(here, run={"broker": "tcp://10.0.0.1:5555", "dir": "/a"})
    theirs = facts(there, run={"broker": "tcp://head:5555", "dir": "/b"})
    assert difference(ours, theirs) == ""


def test_what_differs_is_named_with_both_values(models: tuple[Path, Path, Path]):
    for sections, why in [
        ({"generators": {"dtype": "bfloat16"}}, "generators.dtype is bfloat16 there, expected flo"),
        ({"generators": {"nodes": 1}}, "generators.nodes is 1 there, expected 2"),
        ({"run": {"seed": 7}}, "run.seed is 7 there, expected 0"),
        ({"run": {"name": "b"}}, "run.name is b there, expected run"),
        ({"weightbus": {"in_flight": "in_place"}}, "weightbus.in_flight is in_place there"),
        (
            {"generators": {"max_cached_tokens": 999}},
            "SGLang's max_total_tokens is 999 there, expected 16384",
        ),
        (
            {"generators": {"sglang": {"tp_size": 2, "page_size": 4}}},
            "generators.sglang.page_size is 4 there, expected nothing",
        ),
    ]:
        assert difference(facts(models[0]), facts(models[0], **sections)).startswith(why)


def test_another_model_or_name_is_noticed(models: tuple[Path, Path, Path]):
    ours = facts(models[0])
    assert "config.json in run.model is " in difference(ours, facts(models[2]))
    assert difference(ours, facts(models[0], "generator-1")).startswith(
        "--name is generator-1 there, expected generator-0"
    )
