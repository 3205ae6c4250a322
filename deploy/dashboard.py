"""`slipstream dashboard RUN`: the page of a run, from its broker or from what it left."""

import asyncio
from pathlib import Path

from rich.console import Console

from broker.config import BrokerSection
from broker.dashboard.history import StoredState, read_state
from broker.dashboard.items import RecordedItems
from broker.dashboard.recorder import FinishedRun
from broker.dashboard.web import Dashboard
from deploy.observe import dashboard_address, run_of_folder, status_now
from wire.errors import ConfigError, PeerLostError
from wire.run_folder import PAGE_STATE
from wire.settings import load_table, section
from wire.stopping import stop_event


def show_dashboard(folder: Path, console: Console, *, port: int) -> int:
    """Print the address of the page; serve it until Ctrl-C if no broker does.

    Args:
        folder: of the run.
        console: where to.
        port: to serve at; 0 lets the system choose.

    Raises:
        ConfigError: it is no run folder, or nothing was kept there.
    """
    run = run_of_folder(folder)
    try:
        status_now(run)
    except PeerLostError:
        pass
    else:
        console.print(f"the run goes on: {dashboard_address(run)}", soft_wrap=True)
        return 0
    stored = read_state(folder / PAGE_STATE)
    if stored is None:
        raise ConfigError(
            f"no broker answers for {folder}, and {folder / PAGE_STATE} holds no figures: was "
            "broker.dashboard.enabled false, or the run made by another version?"
        )
    asyncio.run(_serve(folder, stored, console, port))
    return 0


async def _serve(folder: Path, stored: StoredState, console: Console, port: int) -> None:
    broker = section(load_table(folder / "resolved.toml"), "broker", BrokerSection)
    source = FinishedRun(stored, high_water_bytes=broker.high_water_bytes, fsync=broker.redis.fsync)
    dashboard = Dashboard(source, RecordedItems(folder), host="127.0.0.1", port=port)
    stop = stop_event()
    try:
        console.print(f"{await dashboard.start()}\nCtrl-C ends it", soft_wrap=True)
        await stop.wait()
    finally:
        await dashboard.stop()
