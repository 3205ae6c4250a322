import importlib.util
import inspect
import sys
from collections.abc import Iterator
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import attention

from slipstream.learner.model import cuda_attention as module
from slipstream.learner.model.cuda_attention import (
    AttentionBounds,
    choose_attention,
    cuda_attention,
    has_flash_4,
    has_kernel,
    register_flash_4,
    taken_by,
)
from slipstream.wire.errors import ConfigError
from slipstream.wire.models.hf_config import HfConfig

QKV_AND_BOUNDS = "query, key, value, cu_seq_q, cu_seq_k, max_q, max_k"
SIGNATURES = {
    "2.10": f"({QKV_AND_BOUNDS}, is_causal=False, return_aux=None)",
    "2.11": f"({QKV_AND_BOUNDS}, *, return_aux=None, scale=None, window_size=(-1, -1))",
    "2.13": f"({QKV_AND_BOUNDS}, *, return_aux=None, scale=None, window_size=(-1, -1), "
    "enable_gqa=False, seqused_k=None, block_table=None, num_splits=None)",
}


class Varlen:
    """Takes what the ``varlen_attn`` of a release takes, and notes it."""

    def __init__(self, release: str) -> None:
        source: dict[str, Any] = {}
        exec(f"def varlen_attn{SIGNATURES[release]}: pass", source)  # noqa: S102 text from above
        self.__signature__ = inspect.signature(source["varlen_attn"])
        self.given: dict[str, Any] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401 of any signature
        self.given = self.__signature__.bind(*args, **kwargs).arguments
        return self.given["query"] + 1


def attend(monkeypatch: pytest.MonkeyPatch, release: str) -> dict[str, Any]:
    varlen = Varlen(release)
    monkeypatch.setattr(module, "flash_attn_varlen_func", None)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen)
    query, key = torch.zeros(5, 4, 2), torch.zeros(5, 2, 2)
    cu_seqlens = torch.tensor([0, 3, 5], dtype=torch.int32)
    output = cuda_attention(query, key, key, AttentionBounds(cu_seqlens, cu_seqlens, 3, 3), 0.5)
    assert output.equal(torch.ones(5, 4, 2))
    return varlen.given


def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor:
    """Replace ``flash_attn_varlen_func``, which is built on machines with CUDA alone."""
    del key, value, window_size, softcap, alibi_slopes, return_attn_probs, block_table
    assert (max_seqlen_q, max_seqlen_k, dropout_p) == (3, 3, 0.0)
    assert cu_seqlens_q.equal(cu_seqlens_k)
    assert (softmax_scale, causal, deterministic) == (0.5, True, False)
    return query + 2


def test_flash_attn_is_used_where_it_is_installed(monkeypatch: pytest.MonkeyPatch):
    stand_in = ModuleType("flash_attn")
    vars(stand_in)["flash_attn_varlen_func"] = flash
    monkeypatch.setitem(sys.modules, "flash_attn", stand_in)
    name = f"{module.__name__}_with_flash"
    spec = importlib.util.spec_from_file_location(name, module.__file__)
    assert spec is not None
    assert spec.loader is not None
    with_flash = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(with_flash)
    query, cu_seqlens = torch.zeros(5, 4, 2), torch.tensor([0, 3, 5], dtype=torch.int32)
    output = with_flash.cuda_attention(
        query, query, query, AttentionBounds(cu_seqlens, cu_seqlens, 3, 3), 0.5
    )
    assert output.equal(torch.full((5, 4, 2), 2.0))


@pytest.mark.parametrize("release", ["2.11", "2.13"])
def test_each_torch_gets_the_arguments_that_it_knows(release: str, monkeypatch: pytest.MonkeyPatch):
    given = attend(monkeypatch, release)
    assert (given["scale"], given["window_size"]) == (0.5, (-1, 0)), "causal, and of this scale"
    assert (given["max_q"], given["max_k"]) == (3, 3)
    assert given.get("enable_gqa") == (None if release == "2.11" else True)


def test_torch_that_would_attend_to_later_tokens_is_refused(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match=r"scale, window_size.*torch >= 2\.11 or flash-attn"):
        attend(monkeypatch, "2.10")


def test_the_torch_that_is_installed_takes_what_we_give_it():
    from torch.nn.attention.varlen import varlen_attn

    assert taken_by(varlen_attn, {"scale": 1.0, "window_size": (-1, 0)}).keys() == {
        "scale",
        "window_size",
    }
    known = list(inspect.signature(varlen_attn).parameters)
    assert known[:7] == QKV_AND_BOUNDS.split(", ")


def test_what_the_kernels_do_not_take_is_computed_without_them():
    for device, dtype, runs_there in [
        ("cuda", torch.bfloat16, True),
        ("cuda", torch.float16, True),
        ("cuda", torch.float32, False),
        ("cpu", torch.bfloat16, False),
    ]:
        with FakeTensorMode():
            assert has_kernel(torch.empty(5, 4, 2, device=device, dtype=dtype)) == runs_there


@pytest.fixture
def flash_4(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give torch's registry stand-ins for the functions that it calls of FlashAttention 4."""
    interface = ModuleType("flash_attn.cute.interface")
    vars(interface).update(_flash_attn_fwd=flash, _flash_attn_bwd=flash)
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", ModuleType("flash_attn.cute"))
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    yield
    if has_flash_4():
        attention.restore_flash_attention_impl()


@pytest.mark.usefixtures("flash_4")
@pytest.mark.filterwarnings("ignore:Warning only once for all operators")  # of torch 2.11
def test_flash_attention_4_is_registered_under_varlen_attn(monkeypatch: pytest.MonkeyPatch):
    assert register_flash_4(lambda: [torch.ones(2)]) == ""
    assert attention.current_flash_attention_impl() == "FA4"
    assert torch._C._dispatch_has_kernel_for_dispatch_key("aten::_flash_attention_forward", "CUDA")
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen := Varlen("2.13"))
    monkeypatch.setattr(module, "flash_attn_varlen_func", flash)  # and comes before flash-attn 2
    query, ends = torch.zeros(5, 4, 2), torch.tensor([0, 3, 5], dtype=torch.int32)
    output = cuda_attention(query, query, query, AttentionBounds(ends, ends, 3, 3), 0.5)
    assert output.equal(varlen.given["query"] + 1)


def test_without_flash_attention_4_the_reason_is_its_import_error():
    assert register_flash_4(list).startswith("ModuleNotFoundError: No module named 'flash_attn")
    assert not has_flash_4()


@pytest.mark.usefixtures("flash_4")
def test_flash_attention_4_that_raises_or_disagrees_is_left():
    def attempt() -> list[Tensor]:
        if has_flash_4():
            raise ValueError("too many values to unpack\nat some place")
        return [torch.ones(2)]

    assert register_flash_4(attempt) == "ValueError: too many values to unpack"
    assert not has_flash_4()
    refused = register_flash_4(lambda: [torch.ones(2) + 0.1 * has_flash_4()])
    assert refused == "AssertionError: Tensor-likes are not close!"
    assert not has_flash_4()


@pytest.mark.usefixtures("flash_4")
def test_a_torch_without_a_registry_of_attention_keeps_its_own(monkeypatch: pytest.MonkeyPatch):
    for name in ("activate_flash_attention_impl", "current_flash_attention_impl"):
        monkeypatch.delattr(attention, name)
    refused = register_flash_4(lambda: [torch.ones(2)])
    assert refused.startswith("AttributeError: ")
    assert "activate_flash_attention_impl" in refused


MODEL = HfConfig(
    model_type="qwen2",
    vocab_size=8,
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
)


@pytest.mark.usefixtures("flash_4")
def test_flash_attention_4_is_tried_with_the_heads_of_the_model(monkeypatch: pytest.MonkeyPatch):
    def varlen_attn(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *bounds: Any,  # noqa: ANN401 as torch's
        scale: float,
        window_size: tuple[int, int],
    ) -> Tensor:
        assert window_size == (-1, 0)
        ends = zip(*(b.tolist() for b in bounds[:2]), strict=True)
        parts = []
        for (first, first_key), (end, end_key) in pairwise(ends):
            q, k, v = query[first:end], key[first_key:end_key], value[first_key:end_key]
            scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(2, 1)) * scale
            later = torch.ones_like(scores).triu(len(k) - len(q) + 1).bool()
            weights = scores.masked_fill(later, -torch.inf).softmax(-1)
            parts.append(torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(2, 1)))
        return torch.cat(parts)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    seen = []

    def attempt() -> list[Tensor]:
        seen.append(module._attempt(MODEL, torch.empty(0, dtype=torch.bfloat16)))
        return seen[-1]

    assert register_flash_4(attempt) == ""
    assert len(seen) == 2, "by torch's own kernel, and by FlashAttention 4"
    output, query, key, value = seen[0]
    assert output.shape == query.shape == (5, 4, 8)
    assert key.shape == value.shape == (8, 2, 8)
    assert value.any(-1).any(-1).tolist() == [True] * 4 + [False] * 2 + [True] * 2, "not queried"


def test_the_log_names_what_computes_attention(monkeypatch: pytest.MonkeyPatch):
    def chosen(device: str, dtype: torch.dtype, refused: str = "") -> str:
        with FakeTensorMode():
            where = torch.device(device)
            return choose_attention(MODEL, where, dtype, register=lambda _attempt: refused)

    assert chosen("cpu", torch.bfloat16) == "torch's scaled_dot_product_attention"
    assert chosen("cuda", torch.float32) == "torch's scaled_dot_product_attention"
    assert chosen("cuda", torch.bfloat16) == "FlashAttention 4 under torch's varlen_attn"
    missing = "; FlashAttention 4 cannot be had: ImportError: none"
    other = chosen("cuda", torch.bfloat16, "ImportError: none")
    assert other == f"torch's own varlen_attn{missing}"
    monkeypatch.setattr(module, "flash_attn_varlen_func", flash)
    assert chosen("cuda", torch.bfloat16, "ImportError: none") == f"flash-attn 2{missing}"
