import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from slipstream.generators.text.codec import (
    BadPromptError,
    OverlongPromptError,
    TextCodec,
    sibling_seed,
)
from slipstream.wire.errors import ConfigError
from slipstream.wire.messages.trajectory import ChatMessage, Prompt
from slipstream.wire.settings.sections import SamplingSection
from tests.support.blank_model import write_blank_model

EOS = 2
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}+{% endfor %}{% if add_generation_prompt %}={% endif %}"
)
CHAT = Prompt(prompt=(ChatMessage("user", "61"), ChatMessage("user", "4")), row=7)


_READ = ("config", "generation_config", "tokenizer_config", "special_tokens_map")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_blank_model(folder, hidden=16, layers=1)
    return folder


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    write_blank_model(tmp_path / "model", hidden=16, layers=1)
    return tmp_path / "model"


def change(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def codec(folder: Path, **sampling: object) -> TextCodec:
    return TextCodec(folder, SamplingSection(**sampling))  # type: ignore[arg-type]


def asked(text: str, **fields: object) -> Prompt:
    return Prompt(prompt=text, **fields)  # type: ignore[arg-type]


def test_text_becomes_one_token_per_character_and_text_again(model: Path):
    ids = codec(model).encode(asked("61+61=")).token_ids
    assert ids == [9, 4, 13, 9, 4, 16]
    assert codec(model).decode(ids) == "61+61="


def test_special_tokens_are_part_of_an_answer_but_those_that_end_or_pad(copied: Path):
    change(copied / "config.json", vocab_size=64)
    tokenizer = Tokenizer.from_file(str(copied / "tokenizer.json"))
    tokenizer.add_special_tokens(["<think>", "2"])
    tokenizer.save(str(copied / "tokenizer.json"))
    think, two, pad, end = map(tokenizer.token_to_id, ("<think>", "2", "<pad>", "<eos>"))
    assert codec(copied).decode([pad, think, two, end, pad]) == "<think>2"
    assert codec(copied, skip_special_tokens=True).decode([think, two, end]) == ""


def test_special_tokens_are_no_part_of_an_answer(model: Path):
    text = codec(model)
    assert text.decode([*text.encode(asked("122")).token_ids, EOS]) == "122"
    assert text.decode([EOS]) == ""


def test_ids_beyond_the_tokenizer_do_not_fail_where_the_vocabulary_is_padded(copied: Path):
    change(copied / "config.json", vocab_size=64)
    assert codec(copied).decode([5, 63, 4]) == "21"


def test_more_tokens_than_the_model_has_are_refused(copied: Path):
    change(copied / "config.json", vocab_size=10)
    with pytest.raises(ConfigError, match=r"disagree \(run\.model\): .* vocab_size = 10"):
        codec(copied)


def test_a_prompt_may_be_as_long_as_the_limit_and_no_longer(model: Path):
    exact = codec(model, max_prompt_tokens=6)
    assert len(exact.encode(asked("61+61=")).token_ids) == 6
    with pytest.raises(
        ConfigError, match=r"row 4 of add has 7 tokens, sampling\.max_prompt_tokens is 6"
    ):
        exact.encode(asked("61+610=", row=4, data_source="add"))


def test_a_longer_prompt_is_dropped_or_loses_its_beginning_where_asked(model: Path):
    dropping = codec(model, max_prompt_tokens=6, overlong_prompts="drop")
    with pytest.raises(OverlongPromptError, match="has 7 tokens"):
        dropping.encode(asked("61+610="))
    cutting = codec(model, max_prompt_tokens=6, overlong_prompts="truncate")
    assert cutting.decode(cutting.encode(asked("61+610=")).token_ids) == "1+610="


def test_a_prompt_without_tokens_is_refused(model: Path):
    with pytest.raises(BadPromptError, match=r"row 3 of default: no tokens \(data\.on_bad_row\)"):
        codec(model).encode(asked("", row=3))


def test_a_tokenizer_that_truncates_and_pads_by_itself_does_neither_here(copied: Path):
    change(
        copied / "tokenizer.json",
        truncation={"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
    )
    assert len(codec(copied).encode(asked("61+61=")).token_ids) == 6


def test_a_model_without_a_tokenizer_names_the_setting(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"no tokenizer\.json in .*\(run\.model\)"):
        codec(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"is not a tokenizer \(run\.model\)"):
        codec(tmp_path)


def test_a_conversation_goes_through_the_models_template(copied: Path):
    change(copied / "tokenizer_config.json", chat_template=TEMPLATE)
    text = codec(copied)
    assert text.text(CHAT) == "61+4+="
    assert text.decode(text.encode(CHAT).token_ids) == "61+4+="


def test_a_file_beside_the_tokenizer_wins_and_a_setting_wins_over_both(
    copied: Path, tmp_path: Path
):
    named = [{"name": "default", "template": "1"}, {"name": "tool_use", "template": "2"}]
    change(copied / "tokenizer_config.json", chat_template=named)
    assert codec(copied).text(CHAT) == "1"
    (copied / "chat_template.jinja").write_text("3")
    assert codec(copied).text(CHAT) == "3"
    (tmp_path / "mine.jinja").write_text("{{ eos_token }}{{ digit }}{{ messages[0].role }}")
    text = codec(
        copied, chat_template=str(tmp_path / "mine.jinja"), chat_template_kwargs={"digit": 4}
    )
    assert text.text(CHAT) == "<eos>4user"


def test_a_conversation_needs_a_template(model: Path):
    with pytest.raises(ConfigError, match=r"row 7 of default .* set sampling\.chat_template"):
        codec(model).encode(CHAT)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{% if %}", "is not a chat template"),
        ("{{ raise_exception('no system turn') }}", "refuses it: no system turn"),
        ("{{ messages[9].content }}", "refuses it: "),
        ("{{ messages[0].content + 1 }}", "refuses it: "),
        ("{{ ''.__class__.__mro__ }}", "refuses it: "),
    ],
)
def test_a_template_that_fails_names_the_setting(copied: Path, source: str, why: str):
    (copied / "chat_template.jinja").write_text(source)
    with pytest.raises(
        ConfigError, match=rf"(?s){why}.*sampling\.chat_template|chat_template.*{why}"
    ):
        codec(copied).encode(CHAT)


def test_every_token_that_ends_a_response_is_known(copied: Path):
    assert codec(copied).end_token_ids == (EOS,)
    change(copied / "generation_config.json", eos_token_id=[2, 5])
    assert codec(copied, stop_token_ids=(9,)).end_token_ids == (EOS, 5, 9)

    change(copied / "generation_config.json", eos_token_id=-1)
    assert codec(copied).end_token_ids == (EOS,)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        *((f"{name}.json", text) for name in _READ for text in ("[]", "null", "[" * 100_000)),
        *(
            ("generation_config.json", f'{{"eos_token_id": {ids}}}')
            for ids in ("[1, null]", "[[95]]", '["95"]', "true", "1.5")
        ),
        ("tokenizer_config.json", '{"chat_template": [{"template": "x"}]}'),
        ("tokenizer_config.json", '{"chat_template": ["x"]}'),
    ],
)
def test_a_file_of_the_model_that_holds_something_else_is_named(copied: Path, file: str, text: str):
    (copied / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    (copied / file).write_text(text)
    with pytest.raises(ConfigError, match=rf"{file}.*\(run\.model\)"):
        codec(copied)


def test_a_stop_token_that_the_model_does_not_have_is_refused(copied: Path):
    with pytest.raises(ConfigError, match=r"sampling\.stop_token_ids has 999, .* 0 to \d+"):
        codec(copied, stop_token_ids=(3, 999))


def test_a_seed_depends_on_run_kind_position_and_sibling_and_is_the_same_in_every_release():
    seed = sibling_seed(1, "train", 17, 3)
    assert seed == 2860665278069204910
    others = [
        sibling_seed(2, "train", 17, 3),
        sibling_seed(1, "eval", 17, 3),
        sibling_seed(1, "train", 18, 3),
        sibling_seed(1, "train", 17, 4),
    ]
    assert len({seed, *others}) == 5
    assert all(0 <= s < 2**63 for s in others)
