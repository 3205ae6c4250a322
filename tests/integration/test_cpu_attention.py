"""SGLang's attention on a CPU as we shortened it, against its own."""

import json
from pathlib import Path

import pytest

from tests.integration.engine_attention import CASES
from tests.support.ranks.run import outputs, start

pytestmark = pytest.mark.integration


def test_new_tokens_see_what_sglang_lets_them_see(tmp_path: Path):
    (printed,) = outputs([start(tmp_path, "integration.engine_attention")])
    found = json.loads(printed)
    assert {name.rsplit(" ", 1)[0] for name in found} == set(CASES)
    assert all(value < 1e-5 for value in found.values()), found  # NaN fails too
