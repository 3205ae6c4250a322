"""Real runs on few cores, whose real engines have the pace of a device each."""

from pathlib import Path

from tests.support.tiny_run import ROOT, TinyRun

BASE_S, SEQUENCE_S = 0.02, 0.002  # of a decode step, and of each of its sequences
_PASSED_ON = '["PYTHONPATH", "PACED_BASE_S", "PACED_SEQUENCE_S"]'


def paced_run(folder: Path, *, generators: int) -> TinyRun:
    """Start a run whose engines take at least ``BASE_S + n SEQUENCE_S`` for a step."""
    folder.mkdir()
    paths = (ROOT / "tests" / "support" / "paced", ROOT / "src", ROOT)
    return TinyRun(
        folder,
        {
            "learner.lr": 0.0,  # answers stay as long
            "run.steps": 26,
            "run.max_staleness_steps": 0,  # sequences per engine depend on how many there are
            "run.group_size": 4,
            "run.groups_per_step": 8,
            "generators.count": generators,
            "generators.max_sequences": 32,
            "generators.concurrency": "fixed",
            "generators.environment": _PASSED_ON,
        },
        environment={
            "PYTHONPATH": ":".join(map(str, paths)),
            "PACED_BASE_S": str(BASE_S),
            "PACED_SEQUENCE_S": str(SEQUENCE_S),
        },
    )
