"""What `slipstream run` says before anything starts."""

import pytest

from slipstream.deploy.commands.run import steps_before_epochs
from slipstream.wire.settings.load import Table


@pytest.mark.parametrize(
    ("run", "said"),
    [
        ({}, False),
        ({"steps": 7}, False),
        ({"epochs": 15}, True),
        ({"epochs": 15, "steps": 7}, False),
        ({"epochs": 0}, False),
    ],
)
def test_epochs_that_the_default_of_steps_may_end_are_remarked(run: Table, *, said: bool):
    note = steps_before_epochs({"run": run})
    assert bool(note) == said
    if said:
        assert "run.epochs = 15, and run.steps is 100 by default" in note
