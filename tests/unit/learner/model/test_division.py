"""What parallel sizes cannot divide is refused by name before a rank is started."""

import msgspec
import pytest

from slipstream.learner.checkpoints.identity import architecture_of
from slipstream.learner.config import LearnerSection
from slipstream.learner.model.division import refuse_layout, section_for, stage_layers, with_vision
from slipstream.wire.errors import ConfigError
from slipstream.wire.models.hf_config import HfConfig
from slipstream.wire.models.vision_config import VisionConfig

DENSE = HfConfig(
    model_type="qwen3",
    vocab_size=131,
    hidden_size=64,
    intermediate_size=90,
    num_hidden_layers=5,
    num_attention_heads=4,
    num_key_value_heads=2,
)
EXPERTS = HfConfig(
    model_type="qwen3_moe",
    vocab_size=131,
    hidden_size=64,
    intermediate_size=91,
    num_hidden_layers=5,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_experts=6,
    num_experts_per_tok=2,
    moe_intermediate_size=33,
)


SINKS = HfConfig(
    model_type="gpt_oss",
    vocab_size=131,
    hidden_size=64,
    intermediate_size=32,
    num_hidden_layers=4,
    num_attention_heads=6,
    num_key_value_heads=2,
    num_experts=4,
    num_experts_per_tok=2,
    full_attention_interval=2,
    sliding_window=16,
    swiglu_limit=7.0,
)


SEEING = HfConfig(
    model_type="qwen3_vl_text",
    vocab_size=131,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    vision=VisionConfig(
        depth=3,
        hidden_size=32,
        intermediate_size=48,
        patch_size=4,
        out_hidden_size=64,
        deepstack_visual_indexes=(0, 1),
    ),
)


def test_a_tower_is_trained_where_there_is_one():
    trained = LearnerSection(vision="trained")
    assert with_vision(SEEING, trained).trains_vision
    assert with_vision(SEEING, LearnerSection()) is SEEING
    assert with_vision(DENSE, trained, "algo.kl.reference") == DENSE
    with pytest.raises(ConfigError, match=r"run\.model \(qwen3\) has no vision tower"):
        with_vision(DENSE, trained)


def test_a_layout_that_does_not_fit_is_refused():
    for hf, learner, why in [
        (
            SINKS,
            {"tensor_parallel": 2, "context_parallel": 6},
            "learner.context_parallel = 6 makes 2 rings of the 3 query heads of a rank, and layers "
            "of run.model have windows of 16 tokens, which rings do not compute: set it to a "
            "number that divides the heads",
        ),
        (
            SINKS,
            {"expert_tensor_parallel": 2},
            "learner.expert_tensor_parallel = 2, and the experts of run.model (gpt_oss) have "
            "biases, with which they are not divided: set it to 1",
        ),
        (
            SEEING,
            {"pipeline_parallel": 2, "layers_per_stage": (1, 3)},
            "the first 2 layers of run.model (qwen3_vl_text) see features of images, and the first "
            "stage has 1: give it more by learner.layers_per_stage, or set "
            "learner.pipeline_parallel or learner.interleaved_chunks lower",
        ),
        (
            DENSE,
            {"tensor_parallel": 4},
            "num_key_value_heads of run.model must be a multiple of learner.tensor_parallel, got 2 "
            "and 4",
        ),
        (
            DENSE,
            {"expert_parallel": 2},
            "learner.expert_parallel = 2, and run.model (qwen3) has no experts",
        ),
        (
            EXPERTS,
            {"expert_parallel": 4},
            "num_experts of run.model must be a multiple of learner.expert_parallel, got 6 and 4",
        ),
        (
            EXPERTS,
            {"expert_tensor_parallel": 2},
            "moe_intermediate_size of run.model must be a multiple of "
            "learner.expert_tensor_parallel, got 33 and 2",
        ),
        (
            DENSE,
            {"pipeline_parallel": 2, "layers_per_stage": (2, 2)},
            "learner.layers_per_stage adds up to 4 layers, run.model has 5",
        ),
        (
            DENSE,
            {"layers_per_stage": (5,)},
            "learner.layers_per_stage needs learner.pipeline_parallel > 1, got 1",
        ),
        (
            DENSE,
            {
                "pipeline_parallel": 2,
                "layers_per_stage": (3, 2),
                "megatron": {"num_layers_in_last_pipeline_stage": 2},
            },
            "learner.layers_per_stage and learner.megatron.num_layers_in_last_pipeline_stage both "
            "divide the layers: set one of them",
        ),
        (
            DENSE,
            {"pipeline_parallel": 3, "megatron": {"num_layers_in_last_pipeline_stage": 2}},
            "learner.megatron.num_layers_in_last_pipeline_stage: 3 layers of the 5 of run.model "
            "remain for 2 ranks of learner.pipeline_parallel = 3, which must divide them",
        ),
        (
            DENSE,
            {"megatron": {"num_layers_in_last_pipeline_stage": 2}},
            "learner.megatron.num_layers_in_last_pipeline_stage: 3 layers of the 5 of run.model "
            "remain for 0 ranks of learner.pipeline_parallel = 1, which must divide them",
        ),
        (
            DENSE,
            {
                "pipeline_parallel": 2,
                "megatron": {
                    "num_layers_in_first_pipeline_stage": 2,
                    "account_for_loss_in_pipeline_split": True,
                },
            },
            "learner.megatron.num_layers_in_first_pipeline_stage and "
            "learner.megatron.account_for_loss_in_pipeline_split divide the layers in two ways: "
            "set those of one",
        ),
        (
            DENSE,
            {"pipeline_parallel": 2, "megatron": {"num_layers_in_last_pipeline_stage": "2"}},
            "learner.megatron.num_layers_in_last_pipeline_stage must be a number of layers, got "
            "'2'",
        ),
        (
            DENSE,
            {
                "pipeline_parallel": 2,
                "interleaved_chunks": 2,
                "megatron": {"account_for_loss_in_pipeline_split": True},
            },
            "learner.megatron.account_for_loss_in_pipeline_split: ranks have [3, 3] layers, and "
            "learner.interleaved_chunks = 2 does not divide each",
        ),
        (
            EXPERTS,
            {"tensor_parallel": 2, "sequence_parallel": False},
            "learner.sequence_parallel = false with learner.tensor_parallel = 2: a mixture of "
            "experts (run.model) needs it",
        ),
        (
            EXPERTS,
            {"recompute": "selective", "recompute_modules": ("mlp",)},
            "learner.recompute_modules has 'mlp', and a qwen3_moe model has none",
        ),
        (
            DENSE,
            {"pipeline_parallel": 3, "interleaved_chunks": 2},
            "learner.pipeline_parallel x learner.interleaved_chunks = 3 x 2 = 6 stages, and "
            "run.model has 5 layers: each stage needs one",
        ),
    ]:
        with pytest.raises(ConfigError) as refusal:
            refuse_layout(hf, LearnerSection(**learner))  # type: ignore[arg-type]  # TOML's types
        assert str(refusal.value) == why


def test_one_that_fits_is_taken():
    for hf, learner, layers in [
        (DENSE, {"tensor_parallel": 2, "pipeline_parallel": 5}, (1, 1, 1, 1, 1)),
        (EXPERTS, {"tensor_parallel": 2, "expert_parallel": 3, "expert_tensor_parallel": 3}, (5,)),
        (
            DENSE,
            {"pipeline_parallel": 2, "megatron": {"num_layers_in_last_pipeline_stage": 2}},
            (3, 2),
        ),
    ]:
        section = LearnerSection(**learner)  # type: ignore[arg-type]  # TOML's types
        refuse_layout(hf, section)
        assert stage_layers(hf, section) == layers


def test_a_stage_without_a_target_is_refused():
    dense = {"num_hidden_layers": 4, "first_k_dense_replace": 2}
    hf = msgspec.structs.replace(EXPERTS, model_type="glm4_moe", **dense)
    learner, targets = LearnerSection(pipeline_parallel=2), ["shared_experts.down_proj"]
    with pytest.raises(
        ConfigError, match=r"names shared_experts\.down_proj, and no layer of .* 0 has"
    ):
        refuse_layout(hf, learner, targets=targets)
    refuse_layout(hf, learner, targets=["down_proj"])
    refuse_layout(hf, LearnerSection(), targets=targets)
    refuse_layout(hf, LearnerSection(pipeline_parallel=2, layers_per_stage=(3, 1)), targets=targets)


def test_a_model_beside_the_policy_is_divided_as_far_as_the_settings_are_about_it():
    learner = LearnerSection(pipeline_parallel=2, layers_per_stage=(1, 2), expert_parallel=2)
    refuse_layout(DENSE, section_for(DENSE, learner), "algo.teacher.model")
    with pytest.raises(ConfigError, match=r"num_key_value_heads of algo\.teacher\.model must"):
        refuse_layout(DENSE, LearnerSection(tensor_parallel=4), "algo.teacher.model")


@pytest.mark.parametrize(
    ("megatron", "chunks", "layers"),
    [
        ({"num_layers_in_last_pipeline_stage": 2}, 1, (4, 4, 2)),
        (
            {"num_layers_in_first_pipeline_stage": 2, "num_layers_in_last_pipeline_stage": 6},
            2,
            (1, 1, 3, 1, 1, 3),
        ),
        ({"num_layers_in_first_pipeline_stage": 2}, 2, (1, 2, 2, 1, 2, 2)),
        ({"account_for_embedding_in_pipeline_split": True}, 1, None),
        (
            {
                "account_for_embedding_in_pipeline_split": True,
                "account_for_loss_in_pipeline_split": True,
            },
            2,
            (1, 2, 2, 2, 2, 1),
        ),
        ({}, 1, (3, 4, 3)),
    ],
)
def test_layers_are_divided_in_megatron_s_own_ways(
    megatron: dict[str, int], chunks: int, layers: tuple[int, ...] | None
):
    hf = msgspec.structs.replace(DENSE, num_hidden_layers=10)
    learner = LearnerSection(
        pipeline_parallel=3, interleaved_chunks=chunks, megatron=dict(megatron)
    )
    if layers is not None:
        assert stage_layers(hf, learner) == layers
        return
    with pytest.raises(ConfigError, match="must divide them"):
        stage_layers(hf, learner)
    assert stage_layers(hf, section_for(hf, learner)) == (
        (3, 4, 3) if chunks == 1 else (1, 2, 2, 2, 2, 1)
    )


@pytest.mark.parametrize("changes", [{"swiglu_limit": 6.0}, {"sliding_window": 15}])
def test_what_no_shape_tells_is_part_of_a_checkpoints_identity(changes: dict[str, float]):
    assert architecture_of(msgspec.structs.replace(SINKS, **changes)) != architecture_of(SINKS)
