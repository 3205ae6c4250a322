"""A learner step's times and throughput once more by verl's names (logging.verl_names)."""

from collections.abc import Mapping

from slipstream.broker.report.trackers.base import Tracker
from slipstream.wire.process.phases import PHASE_TIME

# Names of verl 0.5 and later; docs/coming_from_verl.md has the differences.
_PHASES = {
    "proximal": "timing_s/old_log_prob",
    "train": "timing_s/update_actor",
    "critic": "timing_s/update_critic",
    "export": "timing_s/update_weights",
    "checkpoint": "timing_s/save_checkpoint",
}


def verl_figures(figures: Mapping[str, float]) -> dict[str, float]:
    """Return a step's times and throughput by verl's names; none for other figures."""
    phases = {
        name.removeprefix(PHASE_TIME): seconds
        for name, seconds in figures.items()
        if name.startswith(PHASE_TIME)
    }
    if not phases:
        return {}
    named = {_PHASES[name]: seconds for name, seconds in phases.items() if name in _PHASES}
    whole = sum(phases.values())
    named |= {"timing_s/step": whole, "perf/time_per_step": whole}
    if "throughput/tokens_per_s" in figures:
        named["perf/total_num_tokens"] = figures["throughput/tokens_per_s"] * whole
    if "throughput/mfu" in figures:
        named["perf/mfu/actor"] = figures["throughput/mfu"]
    return named


class WithVerlNames:
    """A tracker that gets these besides."""

    def __init__(self, tracker: Tracker) -> None:
        """Wrap a tracker."""
        self._tracker = tracker

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Add one point to each named curve."""
        self._tracker.log(step, {**figures, **verl_figures(figures)})

    def close(self) -> None:
        """Flush; nothing is logged after it."""
        self._tracker.close()
