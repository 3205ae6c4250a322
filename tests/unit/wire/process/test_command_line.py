"""What a role that ends with a known error says, and its exit code."""

import gc
import logging
from collections.abc import Callable

import pytest

from slipstream.wire.errors import ConfigError, PublishError, SupersededError
from slipstream.wire.process.command_line import (
    EXIT_BAD_SETTINGS,
    EXIT_FAILED,
    EXIT_SUPERSEDED,
    run_role,
)


@pytest.fixture(autouse=True)
def same_search_for_garbage():
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def raises(error: BaseException) -> Callable[[], int]:
    def body() -> int:
        raise error

    return body


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (PublishError("no part has it"), EXIT_FAILED),
        (SupersededError("a newer learner publishes now"), EXIT_SUPERSEDED),
        (
            ExceptionGroup("tasks", [ExceptionGroup("more", [PublishError("the disk")])]),
            EXIT_FAILED,
        ),
    ],
)
def test_a_known_error_is_one_line_and_a_code(
    error: Exception, code: int, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.ERROR, "slipstream")
    assert run_role(raises(error)) == code
    (record,) = caplog.records
    known = error
    while isinstance(known, ExceptionGroup):
        known = known.exceptions[0]
    assert record.getMessage() == str(known)


def test_wrong_settings_and_a_full_disk_are_refused(capsys: pytest.CaptureFixture[str]):
    assert run_role(raises(ConfigError("run.steps is 0"))) == EXIT_BAD_SETTINGS
    assert run_role(raises(OSError(28, "No space left on device", "/runs"))) == EXIT_BAD_SETTINGS
    printed = capsys.readouterr().err
    assert "run.steps is 0" in printed
    assert "No space left on device: /runs (run.dir)" in printed


def test_what_nobody_knows_is_raised():
    with pytest.raises(OSError, match="unknown"):
        run_role(raises(OSError(5, "unknown")))
    with pytest.raises(ExceptionGroup):
        run_role(raises(ExceptionGroup("tasks", [ValueError("a bug")])))
