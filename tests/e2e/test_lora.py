"""Adapters, with every role real."""

from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from slipstream.weightbus.relay.engine_checksums import digest_of, expected_checksums
from slipstream.wire.files.checkpoints import newest_checkpoint, read_checkpoint_info
from tests.support.tiny_run import TinyRun, slipstream

pytestmark = [pytest.mark.e2e]
SAME = 1e-4  # nats


def test_adapters_are_published_in_the_weights(start_run: Callable[..., TinyRun], inputs: Path):
    run = start_run(
        run__steps=4,
        lora__rank=4,
        lora__publish="merged",
        learner__lr=1e-2,
        generators__count=1,
        algo__kl__coefficient=0.1,
    )
    assert run.wait() == 0, run.output
    summary, rollouts = run.summary(), run.rollouts()
    assert (summary["outcome"], summary["trained"]) == ("finished", 16)
    unmoved = [
        difference
        for row in rollouts
        for version, difference in zip(
            row["version_runs"], row["logprob_abs_diff_by_run"], strict=True
        )
        if version["step"] == row["step"]
    ]
    assert unmoved
    assert max(unmoved) < SAME

    final = load_file(run.folder / "model" / "model.safetensors")
    before = load_file(inputs / "model" / "model.safetensors")
    assert {name for name in final if not final[name].equal(before[name].float())} == {
        name for name in final if "_proj." in name
    }
    expected = digest_of(expected_checksums(final))
    assert summary["last_publish"]["engine_digests"] == {"generator-0": expected}
    checkpoint = newest_checkpoint(run.folder)
    assert checkpoint is not None
    adapters = read_checkpoint_info(checkpoint).adapters
    assert adapters is not None
    assert adapters.rank == 4
    slipstream("export", run.folder)
    names = load_file(run.folder / "adapter" / "adapter_model.safetensors").keys()
    assert len(names) == 2 * 2 * 7
    run.assert_nothing_left()
