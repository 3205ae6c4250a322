from dataclasses import replace
from pathlib import Path

from slipstream.deploy.config import DeploySection, RayTable
from slipstream.deploy.preflight.check.run_folder import SeenFolder, judge_folder, judge_roles

FREE = SeenFolder(
    folder=Path("runs/x"),
    exists=False,
    is_running=False,
    free_name="x",
    step=None,
    has_ledger=False,
)
TAKEN = replace(FREE, exists=True, free_name="x-2")


def test_a_folder_is_free_or_resumable():
    for seen, line in [
        (FREE, "ok   run folder: runs/x is free (run.name)"),
        (TAKEN, "warn run folder: runs/x is taken: a new run would be x-2 (run.name)"),
        (
            replace(TAKEN, step=4, has_ledger=True),
            "warn run folder: runs/x is taken: a new run would be x-2; --resume auto resumes it "
            "from step 4 (run.name)",
        ),
        (
            replace(TAKEN, is_running=True, step=4),
            "warn run folder: runs/x is taken: a new run would be x-2; the run in it is under way "
            "(run.name)",
        ),
        (
            replace(FREE, unwritable="/data"),
            "fail run folder: runs/x: /data cannot be written (run.dir)",
        ),
    ]:
        assert judge_folder(seen).line == line


def test_settings_of_a_role_that_is_none_are_named():
    names = ["broker", "learner", "generator-0"]
    fine = DeploySection(cores={"generator": (0,), "generator-0": (1,)})
    assert judge_roles(names, fine).outcome == "ok"
    wrong = DeploySection(cores={"generator-7": (0,)}, ray=RayTable(cpus={"lerner": 2}))
    found = judge_roles(names, wrong).line
    assert found.startswith(
        "warn roles: there is no generator-7 (deploy.cores), lerner (deploy.ray"
    )
