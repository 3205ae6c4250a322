"""What a whole run has to show at its end: its engine computes and holds what was learned."""

from collections.abc import Iterator
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from slipstream.learner.model.weights.shards import in_fp8
from slipstream.weightbus.version.engine_checksums import (
    EngineLayout,
    digest_of,
    expected_checksums,
)
from slipstream.wire.models.families.registry import SCALE_SUFFIX
from slipstream.wire.models.fp8 import is_quantized
from tests.support.hub_form import policy_alone
from tests.support.tiny_run import TinyRun

SAME = 1e-4  # nats; float32 noise between two implementations is about 1e-6
IN_FP8 = 0.3  # nats of a token of a random model whose engine computes in fp8


def assert_trained_and_served(
    run: TinyRun,
    holder: EngineLayout,
    *,
    most_versions: int | None = None,
    is_fp8: bool = False,
    has_tower: bool = False,
) -> dict[str, Any]:
    """Wait for a run whose one engine holds at last what was learned; return its summary.

    Args:
        run: that ends by itself, after an evaluation of its last version.
        holder: of the engine's tensors.
        most_versions: that may have chosen an answer's tokens; others are not compared.
        is_fp8: True if the engine's matrices are in fp8.
        has_tower: True if a vision tower is trained, too.
    """
    assert run.wait() == 0, run.output
    summary = run.summary()
    assert summary["trained"] == 4 * summary["steps"]
    assert summary["equation"]["unaccounted"] == 0
    final = policy_alone(load_file(run.folder / "model" / "model.safetensors"), has_tower=has_tower)
    if is_fp8:
        final = dict(_quantized(final))
    expected = digest_of(expected_checksums(final, holder))
    assert summary["last_publish"]["engine_digests"] == {"generator-0": expected}
    assert summary["last_publish"]["version"] == [1, summary["steps"]]
    fresh = [one for lag, one in run.differences(most_versions=most_versions) if lag == 0]
    assert fresh, "no answer was trained by the step of its own version"
    assert max(fresh) < (IN_FP8 if is_fp8 else SAME)
    assert not is_fp8 or min(fresh) > SAME, "the engine computes as the learner"
    run.assert_listens_here_alone()
    run.assert_nothing_left()
    return summary


def _quantized(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors as they are published in fp8, each matrix quantized as a whole."""
    for name, tensor in tensors.items():
        if not is_quantized(name):
            yield name, tensor
            continue
        numbers, scales = in_fp8(tensor)
        yield name, numbers
        yield name + SCALE_SUFFIX, scales
