"""The reader of tests.support.dependency_calls sees the mistakes that it is there for."""

from pathlib import Path

from tests.support.dependency_calls import uses_in, wrong


def problems(source: str, folder: Path) -> list[str]:
    file = folder / "module.py"
    file.write_text(source)
    return [
        problem
        for use in uses_in(file, folder, frozenset({"torch"}))
        if (problem := wrong(use)) is not None
    ]


def test_a_wrong_use_is_named_with_its_place(tmp_path: Path):
    for source, message in [
        ("import torch\nif torch.cuda.is_there():\n    pass", "torch.cuda.is_there does not exist"),
        ("import torch\ntorch.mm(a, b, out_type=torch.float32)", "no overload takes out_type"),
        (
            "import torch.nn.functional as F\ndef f(x):\n    return F.softmax(x, dims=1)",
            "unexpected keyword argument 'dims'",
        ),
        (
            "def f(x):\n    from torch.nn.attention.varlen import varlen_attn\n"
            "    return varlen_attn(x, x, x)",
            "missing a required argument: 'cu_seq_q'",
        ),
        (
            "from torch.distributed import distributed_c10d as c10d\nc10d._abort_group(1)",
            "_abort_group does not exist",
        ),
        ("from torch.nn.attention import varlen_atn", "varlen_atn does not exist"),
    ]:
        found = problems(source, tmp_path)
        assert found, source
        assert message in found[0]
        assert found[0].startswith("module.py:")


def test_uses_that_fit_are_none(tmp_path: Path):
    source = (
        "import torch\nimport numpy as np\n"
        "from torch.distributed import distributed_c10d as c10d\n"
        "torch.mm(a, b, out_dtype=torch.float32)\ntorch.zeros(3, device='cpu', dtype=torch.int8)\n"
        "c10d._abort_process_group(group)\ntorch.split(x, *sizes, **named)\nnp.no_such_name()\n"
        "torch.cuda.set_device(0)\n"
    )
    assert problems(source, tmp_path) == []
