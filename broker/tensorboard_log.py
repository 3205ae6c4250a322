"""The run's curves as TensorBoard event files, written without torch."""

from pathlib import Path

from tensorboard.summary import Writer

from wire.status import RunStatus, StepPoint


class TensorBoardLog:
    """One point per learner step and per evaluation."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = Writer(str(folder))
        self._num_evals = 0

    def step(self, point: StepPoint, status: RunStatus) -> None:
        """Log a committed step."""
        for name, value in point.metrics.items():
            self._scalar(name, value, point.step)
        for role, rate in status.tokens_per_second.items():
            self._scalar(f"tokens_per_second/{role}", rate, point.step)
        for role, share in status.busy.items():
            self._scalar(f"busy/{role}", share, point.step)
        for reason, count in status.dropped.items():
            self._scalar(f"dropped/{reason}", float(count), point.step)
        total = sum(status.staleness_histogram.values())
        if total:
            mean = sum(int(lag) * n for lag, n in status.staleness_histogram.items()) / total
            self._scalar("staleness/mean_per_token", mean, point.step)
        self.evaluations(status)
        self._writer.flush()

    def evaluations(self, status: RunStatus) -> None:
        """Log the evaluations that are new."""
        for result in status.eval[self._num_evals :]:
            self._scalar("eval/exact_match", result.exact_match, result.step)
        self._num_evals = len(status.eval)

    def close(self, status: RunStatus) -> None:
        """Log what came last and close the file."""
        self.evaluations(status)
        self._writer.flush()
        self._writer.close()

    def _scalar(self, name: str, value: float, step: int) -> None:
        self._writer.add_scalar(name, value, step)
