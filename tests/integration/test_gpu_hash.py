"""The hash of tensors on a GPU against SGLang's own kernels, which Triton's interpreter runs."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks.run import outputs, start

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("engine")
    (text,) = outputs([start(folder, "integration.engine_gpu_hash", anew=True)])
    return json.loads(text)  # type: ignore[no-any-return]  # of a program of ours


def test_the_hash_is_that_of_the_engine_s_kernels(printed: dict[str, Any]):
    assert [len(set(row)) for row in printed["hashes"]] == [1] * 24
    assert len({row[0] for row in printed["hashes"]}) > 20


def test_each_word_is_read_once(printed: dict[str, Any]):
    moved = printed["moved"]
    assert moved.keys() == {"_add_words, create_masked_load", "_add_words, create_masked_store"}
    assert moved["_add_words, create_masked_load"] == 1.0
    assert sum(moved.values()) < 1.2
