"""How a broker begins: its settings in a folder, its ledger, a checkpoint, and the start itself."""

import asyncio
import json
from pathlib import Path

from slipstream.broker.config import BrokerSettings, broker_settings
from slipstream.broker.data.prompts import load_prompts
from slipstream.broker.ledger.commands import Ledger
from slipstream.broker.ledger.state import encode_state
from slipstream.broker.run_ledger import build_ledger
from slipstream.broker.startup import StartState, start_run
from slipstream.wire.files.checkpoints import LEDGER_FILE, ledger_file
from slipstream.wire.settings.load import load_table
from tests.support.ledger_driver import lease, make_ready, train_step
from tests.support.memory_store import MemoryStore


def settings_in(folder: Path, *overrides: str) -> BrokerSettings:
    rows = [{"prompt": f"{i}", "ground_truth": ""} for i in range(10)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.toml").write_text("")
    base = [f"run.dir={folder}", f"data.file={folder / 'train.jsonl'}", "run.groups_per_step=1"]
    return broker_settings(load_table(folder / "run.toml", [*base, *overrides]))


def new_ledger(settings: BrokerSettings) -> Ledger:
    return build_ledger(settings, load_prompts(settings))


def checkpoint(folder: Path, ledger: Ledger) -> Path:
    saved = folder / "step-000000"
    saved.mkdir()
    state = encode_state(ledger.training.snapshot(ledger.book.version))
    (saved / LEDGER_FILE).write_bytes(ledger_file(state))
    return saved


def begun(
    settings: BrokerSettings, store: MemoryStore | None = None, *, restarted: bool = False
) -> StartState:
    owned = store or MemoryStore()
    return asyncio.run(start_run(settings, load_prompts(settings), owned, restarted=restarted))


def trained(ledger: Ledger, steps: int) -> Ledger:
    """Train so many steps of one group, and keep their payloads."""
    for _ in range(steps):
        make_ready(ledger, lease(ledger, "g", max_sequences=8))
        train_step(ledger)
    return ledger
