"""Settings of a command server."""

from typing import Any

import pytest

from slipstream.wire.errors import ConfigError
from slipstream.wire.settings.sections import SamplingSection
from slipstream.wire.settings.serve import longest_of, serve_section, serves

SERVED: dict[str, Any] = {"serve": {"max_models": 2}, "lora": {"rank": 8}}


def test_a_section_makes_a_command_server():
    assert serves(SERVED)
    assert serves({"serve": {}})
    assert not serves({"lora": {"rank": 8}})
    section, lora = serve_section(SERVED)
    assert (section.max_models, section.port, lora.rank) == (2, 8484, 8)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"lora": {}}, r"\[serve\] needs lora\.rank"),
        ({"lora": {"rank": 8, "publish": "merged"}}, "engines that hold adapters"),
        ({"lora": {"rank": 8, "adapter": "a"}}, r"lora\.adapter must be empty"),
        ({"serve": {"max_models": 0}}, r"serve\.max_models"),
        ({"serve": {"keep": 1}}, r"serve\.keep"),
    ],
)
def test_what_serves_nobody_is_refused(changed: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        serve_section(SERVED | changed)


def test_the_longest_sequence_is_that_of_settings_or_of_the_model():
    sampling = SamplingSection(max_prompt_tokens=10, max_response_tokens=20)
    assert longest_of(sampling, 1000) == 30
    assert longest_of(sampling, 16) == 16
