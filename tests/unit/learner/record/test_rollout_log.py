"""Which trained trajectories are recorded, and that each row holds its own tokens."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace as replace_struct
from tokenizers import Tokenizer, decoders, models

from slipstream.learner.batches.packing import SeenImage, TrainTrajectory, pack
from slipstream.learner.record.rollout_log import RolloutLog, TrainedPart, chosen
from slipstream.wire.messages.broker import DeliveredTrajectory
from slipstream.wire.messages.images import ImageSpan
from slipstream.wire.messages.trajectory import TrajectoryHeader, VersionRun
from slipstream.wire.messages.versions import PolicyVersion
from tests.support.blank_model import write_blank_model


def test_every_trajectory_has_the_same_chance_and_the_same_ones_are_chosen_again():
    share = [9, 0, 4, 7, 2, 11]
    counts = Counter(i for step in range(3000) for i in chosen(share, 2, seed=5, step=step))
    assert set(counts) == set(share)
    expected = 3000 * 2 / len(share)
    chi_square = sum((count - expected) ** 2 / expected for count in counts.values())
    assert chi_square < 20.5  # 5 degrees of freedom, 0.1%
    assert chosen(share, 3, seed=5, step=8) == chosen(sorted(share), 3, seed=5, step=8)
    assert [chosen(share, 3, seed=s, step=8) for s in range(4)] != [
        chosen(share, 3, seed=5, step=8)
    ] * 4
    assert chosen(share, 100, seed=5, step=8) == sorted(share)


def delivered(index: int, length: int) -> DeliveredTrajectory:
    header = TrajectoryHeader(
        group_id=index,
        sibling=0,
        lease_id=0,
        num_prompt_tokens=1,
        num_tokens=length,
        version_runs=(VersionRun(1, PolicyVersion(1, 0)),),
        temperature=1.0,
        finish_reason="stop",
    )
    return DeliveredTrajectory(header=header, reward=float(index))


def sequence(index: int, length: int) -> TrainTrajectory:
    return TrainTrajectory(
        token_ids=np.full(length, index, np.int32),
        loss_mask=np.arange(length) > 0,
        behavior_logprobs=np.zeros(length, np.float32),
        temperature=1.0,
    )


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    write_blank_model(tmp_path / "model", hidden=16, layers=1)
    return Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))


def test_rows_come_from_all_microbatches_with_their_own_tokens(
    tmp_path: Path, tokenizer: Tokenizer
):
    lengths = {0: 3, 1: 9, 2: 4, 3: 8, 4: 2, 5: 7}  # of the step; 0 is another rank's
    trajectories = [delivered(index, length) for index, length in lengths.items()]
    parts = []
    for indices in ([1], [3, 2], [5, 4]):
        batch = pack([sequence(i, lengths[i]) for i in indices], torch.device("cpu"))
        parts.append(TrainedPart(indices, batch, batch.token_ids.float()))
    log = RolloutLog(tmp_path, per_step=2, seed=1, max_bytes=10_000_000, tokenizer=tokenizer)
    for step in range(40):
        log.record(step, trajectories, parts)
    rows = [json.loads(line) for line in (tmp_path / "trained.jsonl").read_text().splitlines()]
    assert Counter(row["step"] for row in rows) == dict.fromkeys(range(40), 2)
    assert {row["group_id"] for row in rows} == {1, 2, 3, 4, 5}
    for row in rows:
        index = row["group_id"]
        assert row["token_ids"] == [index] * lengths[index]
        assert row["reward"] == index
        assert row["logprob_diffs"] == [index] * (lengths[index] - 1)
        assert len(row["token_texts"]) == lengths[index] - 1
        assert "".join(row["token_texts"]) == row["answer"]


def test_bytes_that_are_no_text_are_recorded_too(tmp_path: Path):
    pieces = ["<unk>", "a", "b", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    fallback = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    fallback.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    log = RolloutLog(tmp_path, per_step=1, seed=1, max_bytes=10_000_000, tokenizer=fallback)
    draw = np.random.default_rng(3)
    for step in range(200):
        token_ids = draw.integers(1, len(pieces), 60).astype(np.int32)
        batch = pack([replace(sequence(0, 60), token_ids=token_ids)], torch.device("cpu"))
        log.record(step, [delivered(0, 60)], [TrainedPart([0], batch, batch.token_ids.float())])
    rows = [json.loads(line) for line in (tmp_path / "trained.jsonl").read_text().splitlines()]
    assert [len(row["token_texts"]) for row in rows] == [59] * 200


def test_the_newest_rows_stay_when_the_file_is_full(tmp_path: Path, tokenizer: Tokenizer):
    def record(log: RolloutLog, steps: range) -> list[int]:
        batch = pack([sequence(0, 5)], torch.device("cpu"))
        for step in steps:
            log.record(step, [delivered(0, 5)], [TrainedPart([0], batch, batch.token_ids.float())])
        rows = (tmp_path / "trained.jsonl").read_text().splitlines()
        return [json.loads(row)["step"] for row in rows]

    log = RolloutLog(tmp_path, per_step=1, seed=1, max_bytes=3_000, tokenizer=tokenizer)
    steps = record(log, range(50))
    assert steps == list(range(steps[0], 50))
    assert (tmp_path / "trained.jsonl").stat().st_size + 500 >= 1_500
    assert (tmp_path / "trained.jsonl").stat().st_size <= 3_000
    tiny = RolloutLog(tmp_path, per_step=1, seed=1, max_bytes=10, tokenizer=tokenizer)
    assert record(tiny, range(50, 52)) == []
    roomy = RolloutLog(tmp_path, per_step=1, seed=1, max_bytes=10_000, tokenizer=tokenizer)
    assert record(roomy, range(10, 20)) == list(range(10, 20))
    size = (tmp_path / "trained.jsonl").stat().st_size
    exact = RolloutLog(tmp_path, per_step=1, seed=1, max_bytes=size, tokenizer=tokenizer)
    roomy.forget_from(19)
    assert record(exact, range(19, 20)) == list(range(10, 20)), "it fits to the byte"


def test_steps_that_are_trained_again_are_forgotten_with_what_was_half_written(
    tmp_path: Path, tokenizer: Tokenizer
):
    def make_log(max_bytes: int) -> RolloutLog:
        return RolloutLog(tmp_path, per_step=2, seed=1, max_bytes=max_bytes, tokenizer=tokenizer)

    def record(log: RolloutLog, step: int) -> None:
        batch = pack([sequence(0, 5)], torch.device("cpu"))
        log.record(step, [delivered(0, 5)], [TrainedPart([0], batch, batch.token_ids.float())])

    file = tmp_path / "trained.jsonl"
    log = make_log(10_000_000)
    log.forget_from(0)
    for step in (0, 1, 2, 3):
        record(log, step)
    row_bytes = file.stat().st_size // 4
    with file.open("a") as rows:
        rows.write('{"step": 1, "group_')  # as a killed learner leaves it
    restarted = make_log(4 * row_bytes)
    restarted.forget_from(2)
    for step in (2, 3, 4):
        record(restarted, step)
    steps = [json.loads(line)["step"] for line in file.read_text().splitlines()]
    assert steps == [2, 3, 4], "there was room for four rows: the oldest two went"
    assert [path.name for path in tmp_path.glob("*trained*")] == ["trained.jsonl"]
    make_log(10_000_000).forget_from(0)
    assert file.read_text() == ""


def test_a_row_has_its_images_and_one_token_for_each_in_the_text(
    tmp_path: Path, tokenizer: Tokenizer
):
    seven = tokenizer.token_to_id("7")
    of_image = ImageSpan("5e" * 32, 1, 4, 4, 4)
    later = ImageSpan("6f" * 32, 7, 1, 2, 2)
    with_images = replace(
        sequence(seven, 9),
        images=tuple(
            SeenImage(span, 2, np.zeros((4, 3), np.float32)) for span in (of_image, later)
        ),
    )
    batch = pack([with_images, sequence(seven, 4)], torch.device("cpu"))
    header = replace_struct(
        delivered(0, 9).header,
        num_prompt_tokens=6,
        version_runs=(VersionRun(6, PolicyVersion(1, 0)),),
    )
    trajectories = [replace_struct(delivered(0, 9), header=header), delivered(1, 4)]
    log = RolloutLog(tmp_path, per_step=2, seed=1, max_bytes=10_000_000, tokenizer=tokenizer)
    log.record(1, trajectories, [TrainedPart([0, 1], batch, batch.token_ids.float())])
    shown, plain = (
        json.loads(line) for line in (tmp_path / "trained.jsonl").read_text().splitlines()
    )
    assert (shown["prompt"], shown["answer"]) == ("777", "777")
    assert shown["images"] == [
        {"digest": "5e" * 32, "first_token": 1, "num_tokens": 4, "rows": 4, "columns": 4},
        {"digest": "6f" * 32, "first_token": 7, "num_tokens": 1, "rows": 2, "columns": 2},
    ]
    assert len(shown["token_ids"]) == 9
    assert (plain["prompt"], plain["images"]) == ("7", [])
