from pathlib import Path

import pytest

from deploy.addition import write_blank_model
from generators.prompting import TextCodec
from wire.errors import ConfigError

EOS = 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_blank_model(folder, hidden=16, layers=1)
    return folder


def test_text_becomes_one_token_per_character_and_text_again(model: Path):
    codec = TextCodec(model, max_prompt_tokens=8)
    ids = codec.encode("61+61=")
    assert ids == [9, 4, 13, 9, 4, 16]
    assert codec.decode(ids) == "61+61="


def test_special_tokens_are_no_part_of_an_answer(model: Path):
    codec = TextCodec(model, max_prompt_tokens=8)
    assert codec.decode([*codec.encode("122"), EOS]) == "122"
    assert codec.decode([EOS]) == ""


def test_a_prompt_may_be_as_long_as_the_limit_and_no_longer(model: Path):
    codec = TextCodec(model, max_prompt_tokens=6)
    assert len(codec.encode("61+61=")) == 6
    with pytest.raises(ValueError, match=r"has 7 tokens, sampling\.max_prompt_tokens is 6"):
        codec.encode("61+610=")


def test_a_prompt_without_tokens_is_refused(model: Path):
    with pytest.raises(ValueError, match="prompt '' has no tokens"):
        TextCodec(model, max_prompt_tokens=6).encode("")


def test_a_model_without_tokenizer_names_the_setting(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"no tokenizer\.json in .*\(run\.model\)"):
        TextCodec(tmp_path, max_prompt_tokens=6)
