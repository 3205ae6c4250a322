"""Tokenizers without tokenizer.json, trained on a few lines: of sentencepiece and of tiktoken."""

import base64
import io
import json
from pathlib import Path
from typing import Literal

import sentencepiece
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

LINES = [
    "the quick brown fox jumps over the lazy dog",
    "numbers 123 and 4567, isn't it?",
    "Größe héllo wörld \u4f60\u597d\u4e16\u754c \u0434\u0430",
    "def f(x):\n    return x  +  1\t# ok",
] * 40
TEXTS = ["The fox isn't 12345!", "x  =  1\n\ty", "\u4f60\u597d Größe", "zebra \u2603", ""]
# Texts are split otherwise than by transformers' own pattern: digits one by one.
PATTERN_PARTS = [r"[^\r\n\p{L}\p{N}]?\p{L}+", r"\p{N}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s+"]
QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)  # Qwen2's published tokenizer.json
CODE = f'''
import tiktoken


class OwnTokenizer:
    """As Moonlight's: a pattern in the class, tokens in a file of tiktoken's."""

    vocab_files_names = {{"vocab_file": "tiktoken.model"}}
    pat_str = "|".join({PATTERN_PARTS!r})


raise RuntimeError("code beside a model is never run")
'''


def _write(folder: Path, *, model_type: str, **tokenizer: object) -> Path:
    folder.mkdir(parents=True)
    config = {"model_type": model_type, "vocab_size": 600}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return folder


def write_sentencepiece(
    folder: Path, kind: Literal["bpe", "unigram"] = "bpe"
) -> sentencepiece.SentencePieceProcessor:
    """Write a folder as a slow LlamaTokenizer is saved, and return what it was made with."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES),
        model_writer=model,
        vocab_size=400,
        model_type=kind,
        byte_fallback=True,
        split_digits=True,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        hard_vocab_limit=False,
        num_threads=1,
        minloglevel=2,
    )
    _write(
        folder,
        model_type="llama",
        tokenizer_class="LlamaTokenizer",
        bos_token="<s>",  # noqa: S106 no secret
        eos_token="</s>",  # noqa: S106
        unk_token="<unk>",  # noqa: S106
        add_bos_token=True,
        legacy=False,
    )
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def write_tiktoken(folder: Path, *, name: str = "tiktoken.model", code: str = CODE) -> Tokenizer:
    """Write a folder with a file of tiktoken's and code, and return what it was made with."""
    tokenizer = _byte_pairs("|".join(PATTERN_PARTS))
    size = _write_ranks(tokenizer, folder, name)
    facts = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    added = {
        str(size): {"content": "[BOS]", "special": True, **facts},
        str(size + 3): {"content": "<|im_end|>", "special": True, **facts},
        str(size + 4): {"content": "<think>", "special": False, **facts},
    }
    auto_map = {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}
    content = {"tokenizer_class": "OwnTokenizer", "auto_map": auto_map, "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(
        json.dumps(content | {"added_tokens_decoder": added})
    )
    (folder / "tokenization_own.py").write_text(code)
    return tokenizer


def write_vocabulary(folder: Path) -> Tokenizer:
    """Write a folder as a slow Qwen2Tokenizer is saved, and return what it was made with."""
    tokenizer = _byte_pairs(QWEN2_PATTERN)
    _write(folder, model_type="qwen2")
    tokenizer.model.save(str(folder))  # vocab.json and merges.txt
    size = tokenizer.get_vocab_size()
    added = {str(size): {"content": "<|im_end|>", "special": True, "normalized": False}}
    content = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(
        json.dumps(content | {"added_tokens_decoder": added})
    )
    return tokenizer


def _byte_pairs(pattern: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    of_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, of_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(LINES, trainer)
    return tokenizer


def _write_ranks(tokenizer: Tokenizer, folder: Path, name: str) -> int:
    _write(folder, model_type="deepseek_v3")
    characters = _bytes_of_characters()
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    lines = (
        base64.b64encode(bytes(characters[one] for one in token)) + b" %d\n" % number
        for token, number in vocabulary
    )
    (folder / name).write_bytes(b"".join(lines))
    return len(vocabulary)


def _bytes_of_characters() -> dict[str, int]:
    """Return the byte that each character of a byte-level tokenizer stands for."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): b for i, b in enumerate(others)}
