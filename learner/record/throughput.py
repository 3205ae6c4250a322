"""Pure: speed of a learner step, and its waits.

Seconds are rank 0's, by phase (PhaseClock), and cover all time since the previous commit. Tokens
are divided by the time of the whole step: a run's own speed. FLOPs are divided by the phase
``train`` alone, which computes them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from slipstream.wire.process.phases import WAIT

_TERA = 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """Work of all ranks together in a learner step."""

    num_tokens: int  # tokens of the batch, prompts included
    num_trained_tokens: int  # tokens of the batch that the policy chose
    flops: float  # FLOPs of the policy's forward and backward passes in the phase ``train``


def throughput_figures(
    work: StepWork, phase_s: Mapping[str, float], *, ranks: int, peak_tflops: float | None
) -> dict[str, float]:
    """Return the figures of a step. A figure without a known divisor is left out.

    ::

        tokens_per_s         num_tokens / step             step = seconds of all phases
        trained_tokens_per_s num_trained_tokens / step
        tflops_per_rank      flops / 10^12 / train / ranks train = seconds of that phase
        mfu                  tflops_per_rank / peak_tflops
        stall_data           (wait + fetch) / step
        stall_publish        export / step

    ``flops`` is of ``SequenceCost``: recomputation does not count, nor do forward passes of the
    proximal and reference policies, teachers and critics. Except for a full KL's, these passes are
    not in ``train`` either. The optimizer's time is.
    """
    step_s, train_s = sum(phase_s.values()), phase_s.get("train", 0.0)
    figures: dict[str, float] = {}
    if step_s > 0:
        figures["throughput/tokens_per_s"] = work.num_tokens / step_s
        figures["throughput/trained_tokens_per_s"] = work.num_trained_tokens / step_s
        for_data = phase_s.get(WAIT, 0.0) + phase_s.get("fetch", 0.0)
        figures["throughput/stall_data"] = for_data / step_s
        figures["throughput/stall_publish"] = phase_s.get("export", 0.0) / step_s
    if train_s > 0 and work.flops > 0:
        tflops = work.flops / _TERA / train_s / ranks
        figures["throughput/tflops_per_rank"] = tflops
        if peak_tflops is not None:
            figures["throughput/mfu"] = tflops / peak_tflops
    return figures
