"""Settings of a run on GPUs, as the targets of `slipstream render` take them."""

from pathlib import Path

from slipstream.deploy.config import RunConfig, run_config
from slipstream.wire.settings.load import Table
from tests.support.blank_model import write_blank_model


def config_to_render(folder: Path, count: int, **sections: dict[str, object]) -> RunConfig:
    """Return a run of 4 ranks and so many engines, with these values in its sections."""
    if not (folder / "model").exists():
        write_blank_model(folder / "model", hidden=16, layers=1)
    table: Table = {
        "run": {"name": "demo", "model": str(folder / "model")},
        "data": {"file": "train.jsonl"},
        "generators": {"device": "cuda", "count": count},
        "learner": {"ranks": 4},
    }
    for name, values in sections.items():
        table[name] = {**table.get(name, {}), **values}
    return run_config(table)
