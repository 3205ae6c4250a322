import json
import subprocess
import sys
from datetime import datetime

import pytest

PROGRAM = """
import logging
from slipstream.wire.process.logs import start_logging
from slipstream.wire.settings.sections import LoggingSection
start_logging("generator-0", LoggingSection(level={level!r}, format={form!r}))
log = logging.getLogger("slipstream.x")
log.info("adopted %s", "v1.7")
log.warning("forged\\n2026 I broker all is well \\x1b[2J")
try:
    raise ValueError("why")
except ValueError:
    log.exception("it failed")
"""


def printed(level: str, form: str) -> list[str]:
    program = PROGRAM.format(level=level, form=form)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return done.stderr.splitlines()


def test_a_line_has_a_date_a_zone_a_level_and_its_role():
    first, forged, *_ = printed("info", "text")
    when, level, role, said = first.split(" ", 3)
    assert datetime.fromisoformat(when).utcoffset() is not None
    assert (level, role, said) == ("I", "generator-0", "adopted v1.7")
    assert " W generator-0 forged" in forged
    assert "\x1b" not in forged


def test_json_has_an_object_on_each_line():
    first, forged, failed = map(json.loads, printed("info", "json"))
    assert datetime.fromisoformat(first.pop("time")).utcoffset() is not None
    assert first == {
        "level": "info",
        "role": "generator-0",
        "logger": "slipstream.x",
        "message": "adopted v1.7",
    }
    assert forged["message"].startswith("forged\n2026")
    assert "ValueError: why" in failed["exception"]


@pytest.mark.parametrize(("level", "count"), [("info", 3), ("warning", 2), ("error", 1)])
def test_a_level_leaves_out_what_is_less(level: str, count: int):
    assert len(printed(level, "json")) == count
