"""Every model family against transformers and SGLang, layer by layer, and its way in and out.

The models are random, of three layers, as transformers writes them.
"""

import asyncio
import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.generators.sglang.process import SglangProcess
from slipstream.weightbus.version.engine_checksums import (
    differing,
    digest_of,
    expected_checksums,
    has_digest,
)
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.models.families.registry import FAMILIES
from slipstream.wire.models.hf_config import name_alone
from slipstream.wire.models.model_files import WEIGHTS
from tests.integration.sglang_load import client_of
from tests.support.commands import called
from tests.support.families import write_family
from tests.support.family_models import IN_MAKE_TEST, MODELS
from tests.support.hub_form import as_published, in_mxfp4
from tests.support.ranks.run import outputs, reports, start_ranks
from tests.support.tiny_run import sglang_server, write_policy

pytestmark = pytest.mark.integration
DENSE, EXPERTS = "glm4", "deepseek_v3"
QUICK = [
    pytest.param(name, marks=() if name in IN_MAKE_TEST else pytest.mark.slow) for name in MODELS
]
TP2 = {"ranks": 2, "tensor_parallel": 2}
PP2 = {"ranks": 2, "pipeline_parallel": 2}
PRODUCT = {"ranks": 4, "tensor_parallel": 2, "pipeline_parallel": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Each is written once, with a tokenizer."""
    root = tmp_path_factory.mktemp("models")
    write_policy(root / "tokens")

    @cache
    def written(name: str) -> Path:
        folder = write_family(root / name, name)
        for file in (root / "tokens").glob("token*"):
            shutil.copyfile(file, folder / file.name)
        return folder

    return written


async def checksums_of(server: SglangProcess) -> dict[str, str]:
    async with client_of(server) as engine:
        return await engine.checksums()


async def loads_alike(server: SglangProcess, first: Path, second: Path) -> None:
    """An engine computes the same with a version that was loaded next to its weights, or into them.

    It has experts and latent attention, for which SGLang derives tensors of the weights.
    """
    sequences = [[3 + (7 * place) % 30 for place in range(24)]]
    scores = []
    async with client_of(server) as engine:
        for step, (folder, is_staged) in enumerate(
            ((first, False), (second, False), (first, False), (second, True))
        ):
            version = PolicyVersion(1, step)
            if is_staged:
                assert (await engine.stage_folder(folder, version)).keys() == {"stage", "prove"}
            await engine.adopt_folder(folder, version, digest="")
            scores.append((await engine.score(sequences, num_context=4)).logprobs)
    assert scores[3] == scores[1] != scores[0] == scores[2]


def aligned(folder: Path, *words: str, **learner: int) -> dict[str, dict[str, Any]]:
    """Return what `slipstream align` says of each pair."""
    settings = [f"learner.{key}={value}" for key, value in learner.items()]
    done = called("align", folder, "--json", *words, *settings)
    assert done.returncode in {0, 1}, done.stderr
    found = json.loads(done.stdout)["comparisons"]
    assert done.returncode == any(
        not point["is_within"] for pair in found for point in pair["points"]
    )
    return {
        f"{one['one']} {one['other']}": {p["point"]: p["value"] for p in one["points"]}
        for one in found
    }


def test_every_family_has_a_model_here():
    assert {one["model_type"] for one in MODELS.values()} == set(FAMILIES)


@pytest.mark.parametrize("name", QUICK)
def test_learner_engine_and_transformers_agree_at_every_layer(
    model: Callable[[str], Path], name: str
):
    folder = model(name)
    has_experts = FAMILIES[str(MODELS[name]["model_type"])].has_experts
    split = PRODUCT | ({"expert_parallel": 2} if has_experts else {})
    found = aligned(folder, **split)
    assert set(found) == {"learner engine", "learner transformers", "engine transformers"}
    for pair, points in found.items():
        parts = {point.split()[-1] for point in points}
        assert parts == {"attention", "mlp", "logprobs"} | ({"experts"} if has_experts else set())
        sparse = 3 - int(str(MODELS[name].get("first_k_dense_replace", 0))) if has_experts else 0
        assert len(points) == 3 * 2 + 1 + sparse
        for point, value in points.items():
            assert value <= (0.0 if point.endswith("experts") else 1e-4), (pair, point)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_images_in_one_pack_are_seen_as_transformers_sees_each_alone(
    model: Callable[[str], Path], tmp_path: Path, name: str
):
    """Positions are equal there, and logits; in bfloat16 as far as its digits go.

    A trained tower has its share of the learning rate.
    """
    work = tmp_path / "work"
    outputs(start_ranks("support.ranks.seen", model(name), work, 1))
    (report,) = reports(work, 1)
    difference, largest = report["float32"]
    assert difference < 1e-4 * largest
    difference, largest = report["bfloat16"]
    assert difference < 0.06 * largest
    (tower, text), (slow_tower, same_text) = report["1.0"], report["0.25"]
    assert 0 < slow_tower == pytest.approx(0.25 * tower, rel=1e-3)
    assert 0 < same_text == pytest.approx(text, rel=1e-3)


@pytest.mark.slow  # tests/unit/weightbus/version/test_engine_checksums.py has it by hand
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_an_engine_holds_a_tower_as_it_is_published(model: Callable[[str], Path], name: str):
    """A version has the tower if it is trained; else the engine has it from its folder."""
    folder = model(name)
    whole = {name_alone(key): tensor for key, tensor in load_file(folder / WEIGHTS).items()}
    text = {key: tensor for key, tensor in whole.items() if not key.startswith("visual.")}
    with sglang_server(folder, longest=64) as server:
        found = asyncio.run(checksums_of(server))
    assert differing(expected_checksums(whole), found) == []
    for version in (whole, text):
        assert has_digest(found, digest_of(expected_checksums(version)))
    first = "visual.patch_embed.proj.weight"
    moved = whole | {first: whole[first] + 1}
    assert not has_digest(found, digest_of(expected_checksums(moved)))


@pytest.mark.slow  # the test above has their plain form
@pytest.mark.parametrize("name", ["qwen3_5_moe", "gpt_oss"])
def test_published_forms_are_aligned_as_they_are(
    model: Callable[[str], Path], tmp_path: Path, name: str
):
    folder = tmp_path / name
    if name == "gpt_oss":
        shutil.copytree(model(name), folder)
        in_mxfp4(folder)
    else:
        as_published(model(name), folder)
    for pair, points in aligned(folder, ranks=2, expert_parallel=2).items():
        assert max(points.values()) <= 1e-4, pair


def test_the_first_layer_that_differs_is_named(model: Callable[[str], Path]):
    changed = "learner.megatron.softmax_scale=1.0"
    done = called("align", model(DENSE), "--without", "engine", changed)
    assert done.returncode == 1, done.stderr
    (verdict,) = [line for line in done.stdout.splitlines() if line.startswith("learner and")]
    assert verdict.startswith("learner and transformers part at layer 0 attention: ")


# In `make test` it is the learner that differs, without an engine.
@pytest.mark.slow
def test_an_engine_that_differs_is_named(model: Callable[[str], Path], tmp_path: Path):
    """SGLang takes rms_norm_eps for the norms of what is compressed, the others do not (ADR 44)."""
    folder = Path(shutil.copytree(model(EXPERTS), tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    done = called("align", folder)
    assert done.returncode == 1, done.stderr
    verdicts = done.stdout.splitlines()[-3:]
    assert verdicts[0].startswith("learner and engine part at layer 0 attention: ")
    assert verdicts[1] == "learner and transformers agree to 0.0001"
    assert verdicts[2].startswith("engine and transformers part at layer 0 attention: ")


@pytest.mark.parametrize(
    ("learner", "names"),
    [
        pytest.param(
            PRODUCT | {"expert_parallel": 2}, [EXPERTS, "glm4_moe", "gpt_oss"], id="tp2-pp2-ep2"
        ),
        pytest.param(TP2, [*MODELS], id="tp2", marks=pytest.mark.slow),
        pytest.param(PP2, [*MODELS], id="pp2", marks=pytest.mark.slow),
        pytest.param(
            {"ranks": 2, "expert_parallel": 2},
            [n for n, one in MODELS.items() if FAMILIES[str(one["model_type"])].has_experts],
            id="ep2",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_weights_come_out_to_the_bit_however_they_are_divided(
    model: Callable[[str], Path], tmp_path: Path, learner: dict[str, int], names: list[str]
):
    (root,) = {model(name).parent for name in names}
    work = tmp_path / "work"
    ranks = start_ranks("support.ranks.round_trip", root, work, learner["ranks"], names, **learner)
    outputs(ranks)
    (report,) = reports(work, 1)
    nothing: dict[str, list[str]] = {"missing": [], "other": [], "published otherwise": []}
    assert report == dict.fromkeys(names, nothing)
    for name in names:
        written = load_file(work / name / "model.safetensors")
        original = load_file(root / name / "model.safetensors")
        assert written.keys() == original.keys()
        assert all(written[key].equal(original[key]) for key in original)


def test_weights_of_8_bits_are_loaded_as_their_blocks_say(
    model: Callable[[str], Path], tmp_path: Path
):
    """Numbers times the scales of their blocks, some of which the split of the ranks cuts."""
    plain = model(EXPERTS)
    quantized, expected = tmp_path / "models" / "fp8", tmp_path / "models" / "plain"
    for folder in (quantized, expected):
        shutil.copytree(plain, folder)
    tensors = load_file(plain / "model.safetensors")
    block, stored, values = 24, {}, {}
    for name, tensor in tensors.items():
        if not name.endswith("proj.weight") or "kv_a" in name:
            stored[name] = values[name] = tensor
            continue
        rows, columns = (-(-size // block) for size in tensor.shape)
        scales = 0.5 + torch.rand(rows, columns, generator=torch.Generator().manual_seed(len(name)))
        narrow = tensor.to(torch.float8_e4m3fn)
        wide = scales.repeat_interleave(block, 0).repeat_interleave(block, 1)
        stored |= {name: narrow, f"{name}_scale_inv": scales}
        values[name] = narrow.float() * wide[: tensor.shape[0], : tensor.shape[1]]
    further = {"model.layers.3.enorm.weight": torch.ones(4)}  # predicts a further token
    save_file(stored | further, quantized / "model.safetensors", metadata={"format": "pt"})
    save_file(values, expected / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text()) | {
        "num_nextn_predict_layers": 1,
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [block, block],
        },
    }
    (quantized / "config.json").write_text(json.dumps(config))
    work = tmp_path / "work"
    learner = TP2 | {"expert_parallel": 2}
    outputs(
        start_ranks(
            "support.ranks.round_trip", tmp_path / "models", work, 2, ["plain", "fp8"], **learner
        )
    )
    written = load_file(work / "fp8" / "model.safetensors")
    assert written.keys() == (values | further).keys()
    assert all(written[key].equal(value) for key, value in (values | further).items())
    moved = tmp_path / "moved"
    moved.mkdir()
    others = {key: value + 0.1 * value.float().std() for key, value in values.items()}
    save_file({key: other.to(values[key].dtype) for key, other in others.items()}, moved / WEIGHTS)
    with sglang_server(quantized, longest=64) as server:
        found = asyncio.run(checksums_of(server))
        asyncio.run(loads_alike(server, work / "fp8", moved))
    assert found.keys() == expected_checksums(values).keys(), "the engine has room for others"
    described = json.loads((work / "fp8" / "config.json").read_text())
    assert "quantization_config" not in described
    assert described["num_nextn_predict_layers"] == 1


def test_a_published_folder_comes_out_in_its_form_with_all_that_it_had(
    model: Callable[[str], Path], tmp_path: Path
):
    stored = as_published(model("qwen3_5_moe"), tmp_path / "models" / "published")
    learner = TP2 | {"expert_parallel": 2}
    names = ["published"]
    outputs(
        start_ranks(
            "support.ranks.round_trip", tmp_path / "models", tmp_path / "work", 2, names, **learner
        )
    )
    written = load_file(tmp_path / "work" / "published" / WEIGHTS)
    assert written.keys() == stored.keys()
    for name, tensor in stored.items():
        assert written[name].dtype == tensor.dtype
        assert written[name].equal(tensor), name
    configs = [tmp_path / name / "published" / "config.json" for name in ("models", "work")]
    assert json.loads(configs[0].read_text()) == json.loads(configs[1].read_text())


@pytest.mark.slow  # tests/unit/learner/model/weights/test_hf_tensors.py has them by hand
def test_weights_of_4_bits_are_loaded_as_transformers_does(
    model: Callable[[str], Path], tmp_path: Path
):
    """Ranks have half of the experts each; what they export has no blocks."""
    folder = Path(shutil.copytree(model("gpt_oss"), tmp_path / "models" / "mxfp4"))
    values = in_mxfp4(folder)
    work = tmp_path / "work"
    outputs(
        start_ranks(
            "support.ranks.round_trip", folder.parent, work, 2, ["mxfp4"], **TP2, expert_parallel=2
        )
    )
    written = load_file(work / "mxfp4" / WEIGHTS)
    assert written.keys() == values.keys()
    assert all(written[name].equal(values[name]) for name in values)
    assert "quantization_config" not in json.loads((work / "mxfp4" / "config.json").read_text())
