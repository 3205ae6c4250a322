import importlib.util
import inspect
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from slipstream.learner.model import cuda_attention as module
from slipstream.learner.model.cuda_attention import (
    AttentionBounds,
    cuda_attention,
    has_kernel,
    taken_by,
)
from slipstream.wire.errors import ConfigError

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
