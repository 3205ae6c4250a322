"""A file of demonstrations becomes trajectories."""

import json
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pytest
from pyarrow import parquet

from slipstream.broker.config import DataSection
from slipstream.deploy.commands.replay import imitating
from slipstream.deploy.demonstrations import Counts, DemonstrationReader, write_demonstrations
from slipstream.generators.text.codec import TextCodec
from slipstream.learner.batches.packing import unpack
from slipstream.learner.config import learner_settings
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.trajectory_file import DEMONSTRATED, read_groups
from slipstream.wire.messages.codec import decode_payload
from slipstream.wire.settings.load import load_table
from slipstream.wire.settings.sections import RunSection, SamplingSection
from tests.support.chat_model import write_chat_model

CHAT = [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "2"}]
ROWS: list[dict[str, Any]] = [{"messages": CHAT}, {"messages": CHAT * 2}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("model"))


def reader(model: Path, *, longest: int = 1000, **data: Any) -> DemonstrationReader:  # noqa: ANN401
    return DemonstrationReader(TextCodec(model, SamplingSection()), DataSection(**data), longest)


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_each_row_is_a_group_that_the_learner_can_unpack(tmp_path: Path, model: Path, kind: str):
    file, out = tmp_path / f"a.{kind}", tmp_path / "out.trajectories"
    if kind == "jsonl":
        write(file, *ROWS)
    else:
        parquet.write_table(arrow.Table.from_pylist(ROWS), file)
    counts = write_demonstrations(reader(model), file, out)
    first, second = read_groups(out)
    assert (first.step, second.step) == (DEMONSTRATED, DEMONSTRATED)
    header = second.group.trajectories[0].header
    assert [turn.num_tokens for turn in header.turns] == [2, 2]
    trained = unpack(header, decode_payload(memoryview(second.payloads[0])), vocab_size=99)
    assert trained.loss_mask.sum() == 4
    lengths = [recorded.group.trajectories[0].header.num_tokens for recorded in (first, second)]
    assert (counts.rows, counts.tokens, counts.own_tokens) == (2, sum(lengths), 6)
    assert counts.longest == lengths[1]
    assert write_demonstrations(reader(model), file, None) == counts


def test_bad_rows_end_it_or_are_counted_and_named(tmp_path: Path, model: Path):
    file = write(tmp_path / "a.jsonl", ROWS[0], {"messages": CHAT[:1]}, {"messages": CHAT * 50}, 3)
    with pytest.raises(ConfigError, match=r"--demonstrations: row 1 \(line 2\) of .*: no turn of"):
        write_demonstrations(reader(model), file, None)
    counts = write_demonstrations(reader(model, on_bad_row="skip"), file, None)
    assert [row.partition(" of ")[0] for row, _ in counts.left_out] == [
        *("row 1 (line 2)", "row 2 (line 3)", "row 3 (line 4)")
    ]
    assert "tokens, one of this run has 1,000 at most" in counts.left_out[1][1]
    first, *others = counts.lines(RunSection(groups_per_step=4, steps=10))
    assert first.startswith("1 demonstrations, 3 rows left out")
    assert others[0].startswith(f"  left out: row 1 (line 2) of {file}: no turn")
    assert others[-1] == "10 steps of 4 (run.groups_per_step): 0.25 steps an epoch, 40 epochs"
    only_bad = write(tmp_path / "b.jsonl", {"messages": []})
    with pytest.raises(ConfigError, match=r"no demonstration: row 0 .*: messages has no turns"):
        write_demonstrations(reader(model, on_bad_row="skip"), only_bad, None)
    with pytest.raises(ConfigError, match="holds no demonstration: it has no rows"):
        write_demonstrations(reader(model), write(tmp_path / "c.jsonl"), None)


def test_epochs_bound_the_steps():
    counts = Counts(rows=10)
    assert counts.steps(RunSection(steps=100, groups_per_step=4)) == 100
    assert counts.steps(RunSection(steps=100, groups_per_step=4, epochs=3.0)) == 8
    assert counts.steps(RunSection(steps=5, groups_per_step=4, epochs=3.0)) == 5


def test_the_algorithm_of_the_file_gives_way_to_that_of_demonstrations(tmp_path: Path, model: Path):
    file = tmp_path / "run.toml"
    file.write_text(
        f"""
        [run]
        model = "{model}"
        routing_replay = "R3"
        [algo]
        preset = "vapo"
        advantage.decay = 0.5
        surrogate = "gspo"
        anchor = "behavior"
        entropy_bonus = 0.1
        critic = {{ warmup_steps = 3 }}
        """
    )
    settings = learner_settings(load_table(file, imitating(load_table(file))))
    assert settings.algo.preset == "sft"
    assert (settings.algo.advantage, settings.algo.surrogate, settings.algo.critic) == ({}, {}, {})
    assert (settings.algo.anchor, settings.algo.entropy_bonus) == ("", 0.0)
    assert (settings.run.group_size, settings.run.routing_replay) == (1, "off")
