"""Policy versions and the one definition of staleness."""

import re
from typing import Self

import msgspec

from slipstream.wire.errors import ProtocolError
from slipstream.wire.messages.bounds import Count

_LABEL = re.compile(r"v([0-9]+)\.([0-9]+)")


class PolicyVersion(msgspec.Struct, frozen=True, order=True, array_like=True, gc=False):
    """Weights after ``step`` learner steps, under the ``epoch``-th learner of the run.

    Compare within one run only. ``epoch`` is granted by the broker whenever a learner takes
    over, so versions of one run never go back even where ``step`` does.
    """

    epoch: Count  # >= 1, granted by the broker at take-over
    step: Count  # >= 0, learner steps completed before these weights were published

    def next(self) -> Self:
        """Return the version that this learner's next step will make."""
        return type(self)(self.epoch, self.step + 1)

    @property
    def label(self) -> str:
        """The text under which an engine reports this version, e.g. ``v1.42``."""
        return f"v{self.epoch}.{self.step}"


def parse_label(label: str) -> PolicyVersion:
    """Return the version that an engine's label names; any other text is a ProtocolError."""
    match = _LABEL.fullmatch(label)
    if match is None:
        raise ProtocolError(f"engine reports weight version {label!r}, expected vEPOCH.STEP")
    return PolicyVersion(int(match[1]), int(match[2]))


def staleness_steps(*, learner_step: int, behavior: PolicyVersion) -> int:
    """Return the age in learner steps of the sampling policy at the step that trains it.

    Example: sampled under step 7, trained by the step that turns 9 into 10: staleness 2.
    """
    lag = learner_step - behavior.step
    if lag < 0:
        raise ValueError(f"behavior {behavior} is newer than the learner's step {learner_step}")
    return lag
