"""The advisories of all rules about a run. Pure."""

from collections.abc import Sequence

from slipstream.broker.advisories import communication, progress, resources, stability
from slipstream.broker.advisories.view import Advisory, Level, Rules, RunView, Trends
from slipstream.wire.messages.status import RunStatus

RULES = Rules(progress.RULES | resources.RULES | communication.RULES | stability.RULES)
_LEVELS: Sequence[Level] = ("error", "warning", "info")


def is_ready(status: RunStatus, history: Trends) -> bool:
    """True if there is enough history for rules about time."""
    return RunView.of(status, history).full


def advise(status: RunStatus, history: Trends) -> list[Advisory]:
    """Return the advisories about a run, the worst first."""
    view = RunView.of(status, history)
    advisories = [
        Advisory(
            rule=name, level=finding.level, text=finding.text, setting=finding.setting, why=name
        )
        for name, rule in RULES.items()
        if (finding := rule(view)) is not None
    ]
    return sorted(advisories, key=lambda advisory: _LEVELS.index(advisory.level))
