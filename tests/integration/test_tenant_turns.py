"""Loops of tenants on two ranks: a failure of one ends it on both, and no other."""

import json
from pathlib import Path

import pytest

from tests.support.ranks.run import outputs, start

pytestmark = pytest.mark.integration


def test_a_tenant_that_fails_on_rank_0_leaves_every_rank_and_the_others_go_on(tmp_path: Path):
    ranks = [start(tmp_path, "support.ranks.tenant_turns", tmp_path, rank, 2) for rank in range(2)]
    first, second = map(json.loads, outputs(ranks))
    assert first["did"] == second["did"]
    assert first["order"] == second["order"]
    did = first["did"]
    assert did["fine"] == ["start", 7, 7, 7, 7, "finish", "close"]
    # While it has no batch, a checkpoint that is being written is finished all the same.
    assert did["also fine"] == ["start", 7, 7, 7, "visit", 7, "finish", "close"]
    assert did["lost"] == ["start", 7, 7, "close"]
    assert did["unpublished"] == ["start", 7, 7, "close"]
    assert first["order"][:4] == sorted(did), "each has a turn before one has its second"
    assert first["ends"] == {
        "fine": "",
        "also fine": "",
        "lost": "the learner gave it up: its broker is gone",
        "unpublished": "the learner gave it up: v1.2 is not published",
    }
    assert first["left"] == ["lost", "unpublished"], "their brokers know that no learner remains"
