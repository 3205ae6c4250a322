"""Trace of some learner steps by torch's profiler, for chrome://tracing or Perfetto."""

import logging
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

from slipstream.learner.config import ProfileSection

_log = logging.getLogger(__name__)


class StepProfiler:
    """Traces the steps and ranks named in [profile]."""

    def __init__(self, settings: ProfileSection, folder: Path, *, rank: int) -> None:
        self._settings = settings
        self._steps = settings.steps if rank in settings.ranks else None
        self._path = folder / f"rank-{rank}.json"
        self._profile: torch.profiler.profile | None = None

    def before(self, step: int) -> None:
        """Start the trace if this is its first step; steps count from 1."""
        if self._steps is None or self._profile is not None:
            return
        first, last = self._steps
        if first <= step <= last:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._profile = torch.profiler.profile(
                activities=activities,
                record_shapes=self._settings.record_shapes,
                with_stack=self._settings.with_stack,
                profile_memory=self._settings.profile_memory,
            )
            self._profile.start()

    def after(self, step: int) -> None:
        """Write the trace if this was its last step."""
        if self._steps is not None and step >= self._steps[1]:
            self.close()

    def close(self) -> None:
        """Write the trace so far."""
        if self._profile is None:
            return
        profile, self._profile = self._profile, None
        self._steps = None
        profile.stop()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(self._path))
        _log.info("wrote the trace %s", self._path)
