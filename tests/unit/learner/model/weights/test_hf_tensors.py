import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from slipstream.learner.model.weights.hf_tensors import HfTensors, dequantized
from slipstream.wire.errors import ConfigError
from slipstream.wire.messages.manifest import TensorSpec
from slipstream.wire.models.families.tables import HfTensor
from slipstream.wire.models.hf_config import load_hf_config
from tests.support.family_models import MODELS, SHAPE

CONFIG = {
    "model_type": "deepseek_v3",
    "vocab_size": 11,
    "hidden_size": 6,
    "intermediate_size": 4,
    "moe_intermediate_size": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "kv_lora_rank": 4,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 4,
}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [4, 4]}
DOWN = "model.layers.0.self_attn.o_proj.weight"  # [6, 8]
O_PROJ = HfTensor(DOWN, ("hidden", "outputs"))


def write(folder: Path, *, without: str = "", **more: torch.Tensor) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": FP8}))
    shapes = load_hf_config(folder).tensor_shapes
    tensors = {name: torch.ones(shape) for name, shape in shapes.items()}
    tensors[DOWN] = tensors[DOWN].to(torch.float8_e4m3fn)
    tensors[f"{DOWN}_scale_inv"] = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    tensors |= more
    tensors.pop(without, None)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def checked(folder: Path) -> None:
    with HfTensors(folder) as tensors:
        tensors.refuse_others(load_hf_config(folder))


def test_a_part_of_a_quantized_tensor_has_the_scales_of_its_blocks(tmp_path: Path):
    write(tmp_path)
    with HfTensors(tmp_path) as tensors:
        tensors.refuse_others(load_hf_config(tmp_path))
        rows = tensors.read(O_PROJ, slice(3, 5), 0)
        columns = tensors.read(O_PROJ, slice(2, 6), 1)
    assert rows.tolist() == [[1.0] * 4 + [2.0] * 4, [3.0] * 4 + [4.0] * 4]
    assert columns[0].tolist() == [1.0, 1.0, 2.0, 2.0]
    assert columns[5].tolist() == [3.0, 3.0, 4.0, 4.0]


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_scales_that_make_no_weights_are_refused(tmp_path: Path, scale: float):
    write(tmp_path, **{f"{DOWN}_scale_inv": torch.tensor([[1.0, 2.0], [3.0, scale]])})
    with HfTensors(tmp_path) as tensors:
        tensors.refuse_others(load_hf_config(tmp_path))
        assert len(tensors.read(O_PROJ, slice(0, 4), 0)) == 4, "blocks of this rank are good"
        with pytest.raises(ConfigError, match=f"such as {scale:g}, expected finite numbers above"):
            tensors.read(O_PROJ, slice(2, 6), 0)


def test_blocks_at_the_ends_may_be_smaller():
    found = dequantized(torch.ones(3, 2), torch.tensor([[2.0], [5.0]]), (2, 4), 0, 1)
    assert found.tolist() == [[2.0, 2.0], [5.0, 5.0], [5.0, 5.0]]


def test_what_would_be_loaded_otherwise_is_refused(tmp_path: Path):
    for without, more, message in [
        (f"{DOWN}_scale_inv", {}, f"{DOWN} is F8_E4M3, and its scales are missing"),
        (
            "",
            {f"{DOWN}_scale_inv": torch.ones(2, 3)},
            r"_scale_inv must have shape \[2, 2\] for blocks of \[4, 4\], got \[2, 3\]",
        ),
        (DOWN, {}, f"holds no tensor {DOWN}"),
        ("", {"model.layers.1.enorm.weight": torch.ones(2)}, "does not have, such as model.layers"),
        ("", {"model.norm.weight": torch.ones(7)}, r"must have shape \[6\] .* got \[7\]"),
    ]:
        write(tmp_path, without=without, **more)
        with pytest.raises(ConfigError, match=f"{message}.*run.model"):
            checked(tmp_path)


def tied(folder: Path, head: torch.Tensor | None) -> None:
    config = CONFIG | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    shapes = load_hf_config(folder).tensor_shapes
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    tensors["model.embed_tokens.weight"] = torch.arange(66.0).view(11, 6)
    if head is not None:
        tensors["lm_head.weight"] = head
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_copy_of_the_embedding_may_lie_beside_it(tmp_path: Path):
    embedding = torch.arange(66.0).view(11, 6)
    for head in (None, embedding.clone(), embedding.bfloat16()):  # whole numbers below 256
        tied(tmp_path, head)
        checked(tmp_path)


def test_an_output_layer_that_would_be_dropped_is_refused(tmp_path: Path):
    embedding = torch.arange(66.0).view(11, 6)
    trained = embedding.clone()
    trained[10, 5] += 1.0  # the last of all
    for head in (trained, torch.cat([embedding, embedding[:1]]), embedding[:, :5].contiguous()):
        tied(tmp_path, head)
        way_out = (
            r"lm_head\.weight with other values .* set tie_word_embeddings to false .*run.model"
        )
        with pytest.raises(ConfigError, match=way_out):
            checked(tmp_path)
    tied(tmp_path, trained)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"tie_word_embeddings": False}))
    with HfTensors(tmp_path) as tensors:  # what it says to do
        tensors.refuse_others(load_hf_config(tmp_path))
        head = HfTensor("lm_head.weight", ("vocabulary", "hidden"))
        assert tensors.read(head, slice(10, 11), 0).tolist() == [[60, 61, 62, 63, 64, 66]]


def test_narrow_numbers_without_a_description_are_refused(tmp_path: Path):
    write(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(ConfigError, match=r"F8_E4M3, expected BF16, .* with quantization_config"):
        checked(tmp_path)


def test_layers_that_predict_further_tokens_are_kept_and_said_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    narrow, norm = "model.layers.1.eh_proj.weight", "model.layers.1.enorm.weight"
    more = {
        narrow: torch.ones(2, 2).to(torch.float8_e4m3fn),
        f"{narrow}_scale_inv": torch.tensor([[3.0]]),
        norm: torch.ones(2),
    }
    write(tmp_path, **more)
    config = {**CONFIG, "quantization_config": FP8, "num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with caplog.at_level(logging.INFO), HfTensors(tmp_path) as tensors:
        tensors.refuse_others(load_hf_config(tmp_path))
        assert tensors.kept == (narrow, norm)
        assert tensors.kept_tensor(narrow).equal(torch.full((2, 2), 3.0, dtype=torch.bfloat16))
        assert tensors.kept_spec(narrow) == TensorSpec(narrow, "bfloat16", (2, 2))
        assert tensors.kept_spec(norm) == TensorSpec(norm, "float32", (2,))
    assert "2 tensors of pictures or of layers that predict further tokens" in caplog.text


def hybrid(folder: Path, *, layers: int, **more: torch.Tensor) -> None:
    """Write a language model of 3 layers within another, whose config.json says so many."""
    text = {**SHAPE, **MODELS["qwen3_5"], "tie_word_embeddings": False, "mtp_num_hidden_layers": 1}
    for count in (3, layers):
        around = {"model_type": "qwen3_5", "text_config": text | {"num_hidden_layers": count}}
        (folder / "config.json").write_text(json.dumps(around))
        if count == 3:
            shapes = load_hf_config(folder).tensor_shapes
    below = {name.replace("model.", "model.language_model.", 1): s for name, s in shapes.items()}
    tensors = {name: torch.ones(shape) for name, shape in below.items()} | more
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_layer_that_config_json_leaves_out_is_none_that_predicts_further_tokens(tmp_path: Path):
    hybrid(tmp_path, layers=2)
    with pytest.raises(ConfigError, match=r"holds 14 tensors that .* such as model\.layers\.2\."):
        checked(tmp_path)


def test_two_tensors_that_would_have_one_name_are_refused(tmp_path: Path):
    hybrid(tmp_path, layers=3, **{"model.norm.weight": torch.zeros(64)})
    both = r"holds model\.language_model\.norm\.weight and model\.norm\.weight, which are one"
    with pytest.raises(ConfigError, match=both):
        checked(tmp_path)


def test_kept_tensors_of_any_shape_have_a_type_that_an_export_can_write(tmp_path: Path):
    number, wide = "mtp.scale", "model.visual.angles"
    more = {number: torch.tensor(2.0), wide: torch.ones(0, 3, dtype=torch.float64)}
    hybrid(tmp_path, layers=3, **more)
    with HfTensors(tmp_path) as tensors:
        tensors.refuse_others(load_hf_config(tmp_path))
        alone = wide.removeprefix("model.")
        assert tensors.kept == (number, alone)
        assert tensors.kept_tensor(number).equal(torch.tensor(2.0))
        assert tensors.kept_spec(number) == TensorSpec(number, "float32", ())
        assert tensors.kept_spec(alone) == TensorSpec(wide, "float32", (0, 3))


SINGLE = "model.layers.0.mlp.experts."  # of two experts: gate and up [4, 6], down [6, 4]


def test_experts_are_read_from_tensors_that_have_all_of_them(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    hf = load_hf_config(tmp_path)
    of_one = {t.name: t for _, mapping in hf.parameters() for t in mapping.tensors}
    tensors = {name: torch.ones(shape) for name, shape in hf.tensor_shapes.items()}
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(SINGLE)}
    both, down = torch.arange(96.0).view(2, 8, 6), torch.arange(48.0).view(2, 6, 4)
    stacked = {f"{SINGLE}gate_up_proj": both, f"{SINGLE}down_proj": down}
    save_file(tensors | stacked, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with HfTensors(tmp_path) as found:
        found.refuse_others(hf)
        for name, rows, dim, expected in [
            ("0.gate_proj", slice(1, 3), 0, both[0, 1:3]),
            ("1.up_proj", slice(1, 3), 0, both[1, 5:7]),
            ("1.up_proj", slice(2, 5), 1, both[1, 4:, 2:5]),
            ("1.down_proj", slice(0, 2), 1, down[1, :, :2]),
        ]:
            part = found.read(of_one[f"{SINGLE}{name}.weight"], rows, dim)
            assert part.equal(expected), name
    wrong = stacked | {f"{SINGLE}gate_up_proj": both[:1]}
    save_file(tensors | wrong, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ConfigError, match=r"gate_up_proj must have shape \[2, 8, 6\] .* got \[1, 8"
    ):
        checked(tmp_path)
    twice = stacked | {f"{SINGLE}1.up_proj.weight": torch.ones(4, 6)}
    save_file(tensors | twice, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"1\.up_proj\.weight and .*gate_up_proj, of all"):
        checked(tmp_path)


GPT_OSS = {
    "model_type": "gpt_oss",
    "vocab_size": 11,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
}
MXFP4 = {"quantization_config": {"quant_method": "mxfp4"}}
PACKED = f"{SINGLE}down_proj"  # [2, 32, 64] by expert, row and column


def write_packed(folder: Path, *, without: str = "", **more: torch.Tensor) -> HfTensor:
    """Write a model with one tensor of 4 bits: expert, row and column decide its numbers."""
    (folder / "config.json").write_text(json.dumps(GPT_OSS | MXFP4))
    hf = load_hf_config(folder)
    tensors = {name: torch.ones(shape) for name, shape in hf.tensor_shapes.items()}
    del tensors[PACKED]
    numbers = torch.arange(2 * 32 * 2 * 16).remainder(256).to(torch.uint8)
    tensors[f"{PACKED}_blocks"] = numbers.view(2, 32, 2, 16)
    tensors[f"{PACKED}_scales"] = 120 + torch.arange(128).remainder(9).to(torch.uint8).view(
        2, 32, 2
    )
    tensors |= more
    tensors.pop(without, None)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return next(
        tensor
        for name, mapping in hf.parameters()
        for tensor in mapping.tensors
        if name.endswith("local_experts.1.linear_fc2.weight")
    )


def test_numbers_of_4_bits_are_read_by_row_and_column(tmp_path: Path):
    tensor = write_packed(tmp_path)
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    table = [*magnitudes, *(-value for value in magnitudes)]

    def by_hand(row: int, column: int) -> float:
        byte = (((32 + row) * 2 + column // 32) * 16 + column % 32 // 2) % 256
        number = table[byte >> 4 if column % 2 else byte & 15]
        return number * 2.0 ** (120 + ((32 + row) * 2 + column // 32) % 9 - 127)

    whole = torch.tensor([[by_hand(row, column) for column in range(64)] for row in range(32)])
    with HfTensors(tmp_path) as tensors:
        tensors.refuse_others(load_hf_config(tmp_path))
        assert tensors.read(tensor, slice(0, 32), 0).equal(whole)
        assert tensors.read(tensor, slice(3, 7), 0).equal(whole[3:7])
        assert tensors.read(tensor, slice(30, 50), 1).equal(whole[:, 30:50]), "blocks are cut"
    assert whole.bfloat16().float().equal(whole), "bfloat16 has all of them"


def test_blocks_of_4_bits_that_make_no_weights_are_refused(tmp_path: Path):
    for without, more, message in [
        (f"{PACKED}_scales", {}, f"holds no tensor {PACKED}_scales"),
        (
            "",
            {f"{PACKED}_scales": torch.ones(2, 32, 3, dtype=torch.uint8)},
            rf"{PACKED}_scales must be U8 of shape \[2, 32, 2\] .* got U8 of \[2, 32, 3\]",
        ),
        (
            "",
            {f"{PACKED}_blocks": torch.ones(2, 32, 2, 16)},
            rf"{PACKED}_blocks must be U8 of shape .* got F32",
        ),
    ]:
        write_packed(tmp_path, without=without, **more)
        with pytest.raises(ConfigError, match=f"{message}.*run.model"):
            checked(tmp_path)
    for scale in (252, 253, 255):
        scales = torch.full((2, 32, 2), scale).byte()
        tensor = write_packed(tmp_path, **{f"{PACKED}_scales": scales})
        with HfTensors(tmp_path) as tensors:
            tensors.refuse_others(load_hf_config(tmp_path))
            if scale == 252:
                assert tensors.read(tensor, slice(0, 32), 0).isfinite().all()
                continue
            with pytest.raises(ConfigError, match=rf"a scale of {scale}, .* expected at most 252"):
                tensors.read(tensor, slice(0, 1), 0)
    write_packed(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(GPT_OSS))
    with pytest.raises(ConfigError, match=r'_blocks, which .* does not say: .* "mxfp4"'):
        checked(tmp_path)
