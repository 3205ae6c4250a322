"""What a whole run has to show at its end: its engine computes and holds what was learned."""

from typing import Any

from safetensors.torch import load_file

from slipstream.weightbus.version.engine_checksums import (
    EngineLayout,
    digest_of,
    expected_checksums,
)
from tests.support.tiny_run import TinyRun

SAME = 1e-4  # nats; float32 noise between two implementations is about 1e-6


def assert_trained_and_served(
    run: TinyRun, holder: EngineLayout, *, most_versions: int | None = None
) -> dict[str, Any]:
    """Wait for a run whose one engine holds at last what was learned; return its summary.

    Args:
        run: that ends by itself, after an evaluation of its last version.
        holder: of the engine's tensors.
        most_versions: that may have chosen an answer's tokens; others are not compared.
    """
    assert run.wait() == 0, run.output
    summary = run.summary()
    assert summary["trained"] == 4 * summary["steps"]
    assert summary["equation"]["unaccounted"] == 0
    final = load_file(run.folder / "model" / "model.safetensors")
    expected = digest_of(expected_checksums(final, holder))
    assert summary["last_publish"]["engine_digests"] == {"generator-0": expected}
    assert summary["last_publish"]["version"] == [1, summary["steps"]]
    fresh = [one for lag, one in run.differences(most_versions=most_versions) if lag == 0]
    assert fresh, "no answer was trained by the step of its own version"
    assert max(fresh) < SAME
    run.assert_listens_here_alone()
    run.assert_nothing_left()
    return summary
