"""What `slipstream dashboard` reports: a broker answers, does not answer, or the run has ended."""

import argparse
from pathlib import Path

import pytest
from msgspec.structs import replace

from slipstream.broker.config import BrokerSection, DashboardTable
from slipstream.broker.history.columns import StoredState
from slipstream.broker.history.history import RunHistory
from slipstream.deploy.commands.dashboard import (
    add_arguments,
    described,
    is_folder_of_runs,
    require_page,
    shown_outcome,
)
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.run_folder import PAGE_ADDRESS
from slipstream.wire.settings.sections import RunSection
from tests.support.run_folders import write_run
from tests.support.wire_samples import STATUS

STORED = StoredState(at_s=1_000.0, status=STATUS, history=RunHistory(began_s=0.0).columns())
WRITTEN = "1970-01-01 00:16:40 UTC"


@pytest.mark.parametrize("outcome", ["finished", "stopped"])
def test_ended_run_is_described_with_its_outcome(outcome: str):
    text = described(STORED, outcome)
    assert text == f"the run has ended ({outcome}); its figures were last recorded at {WRITTEN}"
    assert shown_outcome(STORED, outcome) == outcome


@pytest.mark.parametrize("outcome", ["", "running"])
def test_a_broker_that_does_not_answer_is_not_taken_for_the_end(outcome: str):
    text = described(STORED, outcome)
    assert text.startswith("the broker does not answer, and no end of the run is recorded")
    assert text.endswith(WRITTEN)
    assert shown_outcome(STORED, outcome) == f"last recorded at {WRITTEN}"


def test_outcome_recorded_by_the_broker_counts_without_a_summary():
    ended = replace(STORED, status=replace(STATUS, outcome="finished"))
    assert shown_outcome(ended, "") == "finished"
    assert described(ended, "").startswith("the run has ended (finished)")


def test_the_setting_that_turned_the_page_off_is_named(tmp_path: Path):
    run = RunSection(name="r", dir=str(tmp_path))
    run.folder.mkdir()
    off = BrokerSection(dashboard=DashboardTable(enabled=False))
    with pytest.raises(ConfigError, match=r"broker\.dashboard\.enabled = false"):
        require_page(run, off)
    with pytest.raises(ConfigError, match=r"dashboard\.url is missing"):
        require_page(run, BrokerSection())
    (run.folder / PAGE_ADDRESS).write_text("http://127.0.0.1:1/?token=t")
    require_page(run, BrokerSection())


def test_a_folder_that_holds_runs_and_is_none_is_compared(tmp_path: Path):
    assert not is_folder_of_runs(tmp_path)
    run = write_run(tmp_path / "a")
    assert is_folder_of_runs(tmp_path)
    assert not is_folder_of_runs(run)
    assert not is_folder_of_runs(tmp_path / "missing")


@pytest.mark.parametrize("port", ["99999", "-1", "http"])
def test_what_is_no_port_is_refused(port: str, capsys: pytest.CaptureFixture[str]):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args([f"--port={port}"])
    assert f"a port is 0 to 65535, not '{port}'" in capsys.readouterr().err
