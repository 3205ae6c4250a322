"""Settings of a learner whose checkpoints are all that matters."""

from pathlib import Path

from slipstream.algos.section import AlgoSection
from slipstream.learner.config import LearnerSection, LearnerSettings
from slipstream.weightbus.config import WeightBusSection
from slipstream.wire.settings.sections import CheckpointSection, RunSection


def learner_settings_of(folder: Path, upload: str, *, keep_last: int = 2) -> LearnerSettings:
    """Return settings of run "a" in a folder of runs."""
    return LearnerSettings(
        run=RunSection(name="a", dir=str(folder)),
        learner=LearnerSection(),
        algo=AlgoSection(),
        weightbus=WeightBusSection(),
        checkpoint=CheckpointSection(upload=upload, keep_last=keep_last),
    )
