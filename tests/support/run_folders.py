"""Small run folders as a run leaves them, without a run."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

Scores = Sequence[float]


def write_run(
    folder: Path,
    *,
    steps: int = 40,
    lr: float = 1e-4,
    gain: float = 0.01,
    seconds: float = 3.0,
    outcome: str = "finished",
    scores: Scores = (),
    settings: str = "",
    extra: Mapping[str, float] | None = None,
) -> Path:
    """Write a run whose reward grows by ``gain`` a step, evaluated before it and at its end.

    Args:
        folder: of the run.
        steps: learner steps.
        lr: learner.lr.
        gain: of reward/mean per step.
        seconds: per step.
        outcome: of summary.json.
        scores: reward of each problem in the final evaluation; empty is no evaluation.
        settings: further TOML.
        extra: further figures of each step.
    """
    (folder / "eval").mkdir(parents=True)
    text = (
        f'[run]\nname = "{folder.name}"\nsocket_dir = "{folder}/sockets"\n\n[learner]\nlr = {lr}\n'
    )
    (folder / "resolved.toml").write_text(f"{text}\n[eval]\ntemperature = 0.0\n{settings}")
    summary = {"outcome": outcome, "steps": steps, "total_steps": steps, "elapsed_s": steps * 3.0}
    (folder / "summary.json").write_text(json.dumps(summary))
    lines = [
        {
            "step": step,
            "wall_s": step * seconds,
            "trained_tokens": step * 1000,
            "reward/mean": gain * step,
            "policy/loss": (-1) ** step * 0.1,
            **(extra or {}),
        }
        for step in range(1, steps + 1)
    ]
    if scores:
        mean = sum(scores) / len(scores)
        rounds = [(0, 0.0), (steps, mean)]
        lines[:0] = [{"step": 0, "wall_s": 0.0, "trained_tokens": 0, "eval/mean@1": 0.0}]
        lines.append(
            {
                "step": steps,
                "wall_s": steps * seconds,
                "trained_tokens": steps * 1000,
                "eval/mean@1": mean,
            }
        )
        results = [
            {
                "step": step,
                "overall": {
                    "num_problems": len(scores),
                    "num_answers": len(scores),
                    "num_dropped": 0,
                    "metrics": {"mean@1": value},
                },
                "by_source": {},
                "versions": [],
            }
            for step, value in rounds
        ]
        write_lines(folder / "eval" / "results.jsonl", results)
        answers = [
            {"problem": at, "data_source": "sums", "prompt": f"{at}+1=", "reward": reward}
            for at, reward in enumerate(scores)
        ]
        write_lines(folder / "eval" / f"step-{steps:06d}.jsonl", answers)
    write_lines(folder / "metrics.jsonl", lines)
    return folder


def write_lines(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write rows as JSON, one a line."""
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
