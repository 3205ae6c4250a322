"""What `slipstream run` says before anything starts."""

from slipstream.deploy.commands.run import steps_before_epochs


def test_epochs_that_the_default_of_steps_may_end_are_remarked():
    for run, said in [
        ({}, False),
        ({"steps": 7}, False),
        ({"epochs": 15}, True),
        ({"epochs": 15, "steps": 7}, False),
        ({"epochs": 0}, False),
    ]:
        note = steps_before_epochs({"run": run})
        assert bool(note) == said
        if said:
            assert "run.epochs = 15, and run.steps is 100 by default" in note
