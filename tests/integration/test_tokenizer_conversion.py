"""Tokenizers without tokenizer.json: what is made of them gives the tokens of their own library."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from slipstream.generators.text.codec import TextCodec
from slipstream.wire.errors import ConfigError
from slipstream.wire.models.model_files import copied_files, weight_files
from slipstream.wire.models.tokenizer_conversion import pattern_of
from slipstream.wire.models.tokenizer_hash import tokenizer_hash
from slipstream.wire.settings.sections import RunSection, SamplingSection, model_folder
from tests.support.ranks.run import outputs, start
from tests.support.written_otherwise import (
    CODE,
    TEXTS,
    write_sentencepiece,
    write_tiktoken,
    write_vocabulary,
)

pytestmark = pytest.mark.integration


def converted(folder: Path) -> Path:
    run = RunSection(model=str(folder), cache_dir=str(folder.parent / "cache"))
    copy = model_folder(run)
    assert model_folder(run) == copy
    return copy


def ids(folder: Path, text: str) -> list[int]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    token_ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return token_ids


def test_a_slow_tokenizer_of_sentencepiece_is_converted(tmp_path: Path):
    original = write_sentencepiece(tmp_path / "model")
    shard = "model-00001-of-00001.safetensors"
    for name in (shard, "model.safetensors.index.json"):
        (tmp_path / "model" / name).write_text(json.dumps({"weight_map": {"a": shard}}))
    copy = converted(tmp_path / "model")
    assert [ids(copy, text) for text in TEXTS] == [original.encode(text) for text in TEXTS]
    codec = TextCodec(copy, SamplingSection())
    assert codec.text_ids("the fox") == original.encode("the fox")
    assert codec.end_token_ids == (original.eos_id(),)
    assert codec.decode(original.encode("numbers 123")) == "numbers 123"
    # The rest of the folder is there, and an export is complete.
    names = {path.name for path in copied_files(copy)}
    assert names == {"config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json"}
    assert [path.resolve() for path in weight_files(copy)] == [tmp_path / "model" / shard]
    assert not (tmp_path / "model" / "tokenizer.json").exists()
    before = tokenizer_hash(copy)
    write_other = json.loads((tmp_path / "model" / "config.json").read_text()) | {"vocab_size": 512}
    (tmp_path / "model" / "config.json").write_text(json.dumps(write_other))
    changed = converted(tmp_path / "model")
    assert changed != copy
    assert tokenizer_hash(changed) == before


def test_a_tokenizer_of_tiktoken_is_converted_with_the_pattern_of_its_code(tmp_path: Path):
    original = write_tiktoken(tmp_path / "model")
    copy = converted(tmp_path / "model")
    assert [ids(copy, text) for text in TEXTS] == [original.encode(text).ids for text in TEXTS]
    size = original.get_vocab_size()
    assert ids(copy, "[BOS]<think>1<|im_end|>") == [
        size,
        size + 4,
        *original.encode("1").ids,
        size + 3,
    ]
    codec = TextCodec(copy, SamplingSection())
    assert codec.end_token_ids == (size + 3,)
    assert codec.token_text(size + 1) == f"<|reserved_token_{size + 1}|>"
    assert codec.decode([size + 4, *original.encode("ok").ids, size + 3]) == "<think>ok"


def test_a_slow_tokenizer_of_a_vocabulary_and_merges_is_converted(tmp_path: Path):
    original = write_vocabulary(tmp_path / "model")
    copy = converted(tmp_path / "model")
    assert [ids(copy, text) for text in TEXTS] == [original.encode(text).ids for text in TEXTS]
    assert ids(copy, "<|im_end|>") == [original.get_vocab_size()]


def test_a_vocabulary_and_merges_need_no_config_of_their_own(tmp_path: Path):
    write_vocabulary(tmp_path / "model")
    whole = converted(tmp_path / "model")
    config = json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
    added = config["added_tokens_decoder"].items()
    numbers = {facts["content"]: int(number) for number, facts in added}
    (tmp_path / "model" / "added_tokens.json").write_text(json.dumps(numbers))
    (tmp_path / "model" / "tokenizer_config.json").unlink()
    copy = converted(tmp_path / "model")
    texts = [*TEXTS, *numbers]
    assert [ids(copy, text) for text in texts] == [ids(whole, text) for text in texts]


def test_added_tokens_of_tiktoken_s_have_the_numbers_of_either_file(tmp_path: Path):
    size = write_tiktoken(tmp_path / "model").get_vocab_size()
    path = tmp_path / "model" / "tokenizer_config.json"
    config = json.loads(path.read_text())
    del config["added_tokens_decoder"]
    path.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"no number is given for '<\|im_end\|>', in added_tok"):
        converted(tmp_path / "model")
    numbers = {"<|im_end|>": size + 1, "<think>": size + 2}
    (tmp_path / "model" / "added_tokens.json").write_text(json.dumps(numbers))
    copy = converted(tmp_path / "model")
    assert ids(copy, "<think><|im_end|>") == [size + 2, size + 1]
    assert TextCodec(copy, SamplingSection()).end_token_ids == (size + 1,)
    path.write_text(json.dumps({key: one for key, one in config.items() if key != "eos_token"}))
    (tmp_path / "model" / "added_tokens.json").unlink()
    assert ids(converted(tmp_path / "model"), "1") == ids(copy, "1")  # there may be none


def test_transformers_reads_what_was_made(tmp_path: Path):
    write_sentencepiece(tmp_path / "sentencepiece")
    write_tiktoken(tmp_path / "tiktoken")
    write_vocabulary(tmp_path / "vocabulary")
    copies = [converted(path) for path in sorted(tmp_path.iterdir()) if path.name != "cache"]
    order = {
        "conversations": [[{"role": "user", "content": text}] for text in TEXTS],
        "kwargs": {str(copy): {"chat_template": "{{ messages[0]['content'] }}"} for copy in copies},
    }
    (tmp_path / "order.json").write_text(json.dumps(order))
    command = start(tmp_path, "integration.transformers_chats", tmp_path / "order.json")
    (printed,) = outputs([command])
    assert json.loads(printed) == {
        str(copy): [ids(copy, text) for text in TEXTS] for copy in copies
    }


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("tiktoken.model", CODE),
        ("own.tiktoken", 'class OwnTokenizer:\n    pat_str = r"\\p{L}+|\\p{N}|."\n'),
    ],
)
def test_where_the_pattern_stands_does_not_matter(tmp_path: Path, name: str, code: str):
    write_tiktoken(tmp_path / "model", name=name, code=code)
    one, two, three = ids(converted(tmp_path / "model"), "123")
    assert len({one, two, three}) == 3


@pytest.mark.parametrize(
    "code",
    [
        'PAT_STR = r"a|b"\nEncoding("own", pat_str=PAT_STR)',
        'class Own:\n    pat_str: str = r"a|b"',
        'class Own:\n    def __init__(self):\n        self.pat_str = "a" "|b"',
        'PARTS = ("a", "b")\nBAR = "|"\npat_str = BAR.join(PARTS)',
        'LETTER = "a"\nENCODING = dict(pat_str=LETTER + r"|" + "b")',
        'pat_str = "a|b"\nself.pat_str = re.compile(pat_str)\nEncoding(pat_str=pat_str)',
        'class Own:\n    pat_str = "|".join([r"a", r"b"])\n    f(pat_str=self.pat_str)',
        'class Own:\n    pat_str: str\n    PARTS = ["a", "b"]\n    pat_str = "|".join(PARTS)',
        'class Own:\n    pat_str = "a|b"\nEncoding("own", pat_str=Own.pat_str)',
        'BAR = "|"\nreturn_value = dict(name="own", **{"pat_str": "a" + BAR + "b"})',
    ],
)
def test_a_pattern_of_literals_and_names_is_read(code: str):
    assert pattern_of(code) == "a|b"


@pytest.mark.parametrize(
    "code",
    [
        'pat_str = "a|b"\nEncoding(pat_str=patterns.of("own"))',
        'if OLD:\n    pat_str = "a"\nelse:\n    pat_str = "b"',
        'pat_str = f"{LETTER}|b"',
        "pat_str = pat_str",
        'pat_str = "|".join(["a", other])',
        'pattern = "a|b"',
        "",
        # Of all of these a part was taken.
        'pat_str = "a"\npat_str = pat_str + "|b"',
        'pat_str = "a"\npat_str += "|b"',
        'PAT = "a"\nif MORE:\n    PAT += "|b"\nEncoding(pat_str=PAT)',
        'pat_str = "a|c"\npat_str = pat_str.replace("c", "b")',
        'pat_str = "a"\nif NEW:\n    pat_str = compute()',
        'pat_str = "a"\npat_str, size = compute()',
        'pat_str = "a"\nfor pat_str in patterns():\n    pass',
        'pat_str = "a"\nwith patterns() as pat_str:\n    pass',
        'pat_str = "a"\nfrom patterns import own as pat_str',
        'parts = ["a"]\nparts.append("b")\npat_str = "|".join(parts)',
        'parts = ["a"]\nmore(parts)\npat_str = "|".join(parts)',
        'parts = ["a"]\nparts += ["b"]\npat_str = "|".join(parts)',
        'class Old:\n    pat_str = "a"\nclass New:\n    pat_str = compute()',
        'class O:\n    pat_str = "a"\n    def f(self, pat_str):\n        f(pat_str=pat_str)',
        'class Own:\n    pat_str = "a"\nEncoding(pat_str=config.pat_str)',
        'class A:\n    pat_str = "a"\nclass B(A):\n    def pat_str(self):\n        return own()',
        'pat_str = "a"\nEncoding(**{"pat_str": pat_str.lower()})',
        'pat_str = "a"\narguments["pat_str"] = compute()',
        'f(pat_str="a")\nf(pat_str=compute())',
        'pat_str = "a"\nif (pat_str := compute()):\n    pass',
    ],
)
def test_a_pattern_that_is_computed_or_one_of_several_is_none(code: str):
    assert pattern_of(code) == ""


def test_what_would_have_other_tokens_is_refused(tmp_path: Path):
    write_sentencepiece(tmp_path / "unigram", "unigram")
    with pytest.raises(
        ConfigError, match=r"other tokens of .* than sentencepiece.* \(run\.model\)"
    ):
        converted(tmp_path / "unigram")
    write_tiktoken(tmp_path / "elsewhere", code="from other import pat_str\n")
    with pytest.raises(ConfigError, match=r"pattern of .*OwnTokenizer.* is not found"):
        converted(tmp_path / "elsewhere")
    write_tiktoken(tmp_path / "stripped")
    path = tmp_path / "stripped" / "tokenizer_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({key: one for key, one in config.items() if key != "auto_map"}))
    with pytest.raises(ConfigError, match="pattern of OwnTokenizer that splits texts is not found"):
        converted(tmp_path / "stripped")
    path.write_text(json.dumps(config))
    (tmp_path / "stripped" / "tiktoken.model").write_bytes(b"not of tiktoken's\n")
    with pytest.raises(ConfigError, match=r"none can be made from tiktoken\.model"):
        converted(tmp_path / "stripped")
    assert not list((tmp_path / "cache").glob("*-tokenizer"))
