"""Kernels of a step by group: together with the time in which none ran they are the step."""

import pytest
import torch

from benchmarks.device.kernel_groups import Interval, group_of, intervals_of, seconds_by_group

FUNCTOR = "void at::native::"


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NTN", "products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64_cublas", "products"),
        ("aten::addmm", "products"),
        ("aten::mm", "products"),
        ("pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>", "attention"),
        ("kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttention", "attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("logit_statistics", "logits"),
        ("logit_gradients", "logits"),
        (f"{FUNCTOR}multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>", "update"),
        (f"{FUNCTOR}multi_tensor_apply_kernel<LpNormFunctor<float, NormType::L2>>", "update"),
        ("aten::_fused_adamw_", "update"),
        (f"{FUNCTOR}vectorized_layer_norm_kernel<c10::BFloat16, float, true>", "norms"),
        ("aten::_fused_rms_norm", "norms"),
        (f"{FUNCTOR}vectorized_elementwise_kernel<4, CUDAFunctor_add<float>>", "other"),
        ("Memcpy DtoD (Device -> Device)", "other"),
        ("aten::permute", "other"),
    ],
)
def test_kernels_are_told_apart_by_name(name: str, group: str):
    assert group_of(name) == group


def test_groups_and_idle_time_sum_to_the_step():
    parts = seconds_by_group(
        [
            Interval("logit_statistics", 4e6, 5e6),
            Interval("gemm", 0.0, 2e6),
            Interval("Memcpy", 1e6, 2.5e6),  # half a second of it beside the product
            Interval("Memset", 1e6, 1.5e6),  # beside both
        ],
        step_s=6.0,
    )
    assert {name: s for name, s in parts.items() if s} == {
        "products": 2.0,
        "logits": 1.0,
        "other": 0.5,
        "idle": 2.5,
    }
    assert sum(parts.values()) == 6.0


def test_operators_of_a_cpu_are_counted_without_what_they_call():
    x = torch.ones(64, 64)

    def step() -> None:
        torch.nn.functional.linear(x, x)

    found = intervals_of(step)
    parts = seconds_by_group(found, step_s=1.0)
    assert parts["products"] > 0.0
    assert sum(parts.values()) == pytest.approx(1.0)
