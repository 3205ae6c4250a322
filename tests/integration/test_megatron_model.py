"""The Megatron model against transformers, and against itself when it is split over ranks.

Packed sequences of different lengths, float32, two layers. Each rank is a process of its own,
since Megatron keeps its groups in process-wide state. Other layouts: test_layouts.py.
"""

import json
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import pytest
from safetensors.torch import load_file

from tests.support.ranks.run import outputs, reports, start, start_ranks
from tests.support.tiny_models import FAMILIES, SCALED, write_tiny_model

pytestmark = pytest.mark.integration


def by_token(report: dict, key: str) -> list[float]:
    return [value for i in sorted(report[key], key=int) for value in report[key][i]]


CODE = {"auto_map": {"AutoTokenizer": ["tokenization_own.Own", None], "AutoX": "gone.Own"}}


class Alone(NamedTuple):
    """What one rank makes of a model."""

    model: Path
    work: Path
    expected: list[float]  # logprobs of transformers


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Alone]:
    """Each family is computed once."""

    @cache
    def computed(family: str) -> Alone:
        folder = tmp_path_factory.mktemp(family)
        model, work = write_tiny_model(folder / "model", family), folder / "work"
        (model / "tokenizer_config.json").write_text(json.dumps(CODE))
        (model / "additional_chat_templates").mkdir()
        for name in ("tokenization_own.py", "additional_chat_templates/rag.jinja"):
            (model / name).write_text("# own")
        ranks = start_ranks("support.ranks.megatron", model, work, world_size=1, tensor_parallel=1)
        printed = outputs([start(folder, "integration.transformers_logprobs", model), *ranks])[0]
        return Alone(model, work, [value for one in json.loads(printed) for value in one])

    return computed


@pytest.mark.parametrize(
    "family",
    # test_families.py aligns models of other families in `make test`, and these in two layouts.
    [pytest.param(f, marks=[pytest.mark.slow] * ("llama" in f)) for f in (*FAMILIES, *SCALED)],
)
def test_logprobs_are_those_of_transformers_and_the_export_is_bit_equal(
    alone: Callable[[str], Alone], family: str
):
    _, work, expected = alone(family)
    (report,) = reports(work, 1)
    assert by_token(report, "logprobs") == pytest.approx(expected, abs=2e-5)
    assert report["exported"] == report["original"]
    assert report["num_exported"] == len(report["original"])
    assert report["written"] == report["original"]
    assert report["refused"] == "decoder.layers.1.self_attention.linear_proj.weight"
    assert (work / "exported" / "tokenizer.json").read_text() == "{}"
    for name in ("tokenization_own.py", "additional_chat_templates/rag.jinja"):
        assert (work / "exported" / name).read_text() == "# own"
    of_tokenizer = json.loads((work / "exported" / "tokenizer_config.json").read_text())
    assert of_tokenizer == {"auto_map": {"AutoTokenizer": ["tokenization_own.Own", None]}}
    assert not list(work.glob(".exported*"))


def test_the_number_of_kernels_hardly_grows_with_that_of_sequences(alone: Callable[[str], Alone]):
    _, work, _ = alone("qwen3")
    (report,) = reports(work, 1)
    # Two layers, 48 sequences; Megatron's own rotary embedding took 1,821 and 2,025.
    forward, backward = report["kernels"]
    assert forward < 150
    assert backward < 250


# In megatron-core 0.19; 0.16 is that of Python 3.11.
MENDED = {
    "the router's import",
    "Transformer Engine in latent attention",
    "the version of Transformer Engine",
}


def test_megatron_still_has_the_defects_that_are_repaired(tmp_path: Path):
    (printed,) = outputs([start(tmp_path, "support.ranks.unrepaired", anew=True)])
    gone = {defect for defect, is_there in json.loads(printed).items() if not is_there}
    if version("megatron-core") >= "0.19":
        gone -= MENDED
    assert not gone, (
        "mended upstream: take the repair out of megatron_repairs.py or hybrid_repairs.py"
    )


def test_the_engine_turns_scaled_queries_and_keys_alike(tmp_path: Path):
    (printed,) = outputs([start(tmp_path, "integration.engine_rotary", tmp_path / "models")])
    assert json.loads(printed) == dict.fromkeys(SCALED, pytest.approx(0, abs=2e-6))


@pytest.mark.parametrize("tensor_parallel", [pytest.param(2, id="tp2"), pytest.param(1, id="dp2")])
def test_two_ranks_compute_what_one_computes(
    alone: Callable[[str], Alone], tmp_path: Path, tensor_parallel: int
):
    model, one, _ = alone("qwen2")
    two = tmp_path / "two"
    outputs(start_ranks("support.ranks.megatron", model, two, 2, tensor_parallel=tensor_parallel))
    (unsplit,), split = reports(one, 1), reports(two, 2)
    for key in ("logprobs", "entropies"):
        merged = {key: split[0][key] | split[1][key]}
        assert by_token(merged, key) == pytest.approx(by_token(unsplit, key), abs=5e-6)
    for report in split:
        assert report["data_parallel"] == 2 // tensor_parallel
        assert report["gradient_norm"] == pytest.approx(unsplit["gradient_norm"], rel=1e-5)
        assert report["written"] == report["original"]
    assert split[0]["exported"] == split[0]["original"]
    assert split[0]["refused"] == ""
    spoiled = "decoder.layers.1.self_attention.linear_proj.weight"
    assert bool(split[1]["refused"]) is (spoiled in split[1]["writes"]), "only the writer checks"
    assert all(report["writes"] for report in split)
    if tensor_parallel == 1:
        assert not set(split[0]["writes"]) & set(split[1]["writes"]), "replicas share them out"
    written = load_file(two / "exported" / "model.safetensors")
    original = load_file(model / "model.safetensors")
    assert written.keys() == original.keys()
    assert all(written[name].equal(original[name]) for name in original)
