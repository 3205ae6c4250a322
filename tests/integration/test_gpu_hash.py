"""The hash of tensors on a GPU against SGLang's own kernels, which Triton's interpreter runs."""

import json
from pathlib import Path

import pytest
import torch

from slipstream.weightbus.version.gpu_hash import gpu_hash
from tests.support.ranks.run import outputs, start

pytestmark = pytest.mark.integration
CASES = ((5, torch.bfloat16), (8384, torch.bfloat16), (40_000, torch.float32))


def test_the_hash_is_that_of_the_engine_s_kernels(tmp_path: Path):
    (printed,) = outputs([start(tmp_path, "integration.engine_gpu_hash", anew=True)])
    ours = [
        gpu_hash((torch.arange(number) / 7).to(dtype), torch.device("cpu"))
        for number, dtype in CASES
    ]
    assert json.loads(printed) == ours
