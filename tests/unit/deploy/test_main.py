import pytest

from slipstream.deploy import main as deploy_main
from slipstream.wire.process.command_line import EXIT_INTERRUPTED


def test_ctrl_c_while_a_command_is_imported_ends_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch,
):
    def interrupted(_name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sys.argv", ["slipstream", "status"])
    monkeypatch.setattr(deploy_main.importlib, "import_module", interrupted)
    assert deploy_main.main() == EXIT_INTERRUPTED
