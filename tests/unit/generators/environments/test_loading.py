from pathlib import Path

import pytest

from slipstream.generators.environments.loading import load_environment
from slipstream.wire.errors import ConfigError

SOURCE = """
from slipstream.generators.environments.sdk import Environment
from slipstream.wire.errors import ConfigError

class Checked(Environment):
    def __init__(self, *, most=1):
        pass

    @classmethod
    def prepare(cls, **options):
        if options.get("most", 1) > 3:
            raise ValueError("most: expected 3 at most")

def prepare(*, most=1):
    if most > 3:
        raise ConfigError("install it")

async def rollout(client, prompt, *, most=1):
    return 1.0
"""


@pytest.mark.parametrize(
    ("name", "why"),
    [("Checked", "ValueError: most: expected 3 at most"), ("rollout", "': install it")],
)
def test_options_are_checked_by_the_environment_once(name: str, why: str, tmp_path: Path):
    file = tmp_path / f"checked_{name.lower()}.py"
    file.write_text(SOURCE)
    with pytest.raises(ConfigError, match=rf"environment\.options of .*{why}"):
        load_environment(f"{file}:{name}", {"most": 4})
    assert load_environment(f"{file}:{name}", {"most": 3}).version


def test_a_library_that_is_missing_is_named_with_its_extra(tmp_path: Path):
    file = tmp_path / "needing.py"
    file.write_text(
        "from slipstream.wire.errors import ConfigError\n"
        "raise ConfigError(\"pip install 'slipstream[env-x]'\")"
    )
    with pytest.raises(ConfigError, match=r"cannot load .*needing\.py:A': pip install 'slip"):
        load_environment(f"{file}:A", {})
