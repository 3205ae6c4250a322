"""Makes the tokenizer.json of a tokenizer that is written otherwise, as transformers reads it.

Code beside a model is read for the pattern that splits its texts, and never run.
"""

import ast
import base64
import json
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from slipstream.wire.errors import ConfigError

# By its library, and what the library's module is called.
_LIBRARIES = {
    "transformers": "transformers",
    "sentencepiece": "sentencepiece",
    "protobuf": "google",
}
_TIKTOKEN = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?\n")  # a line of it: token and rank
_PROBES = (  # a conversion that goes wrong shows in one of them
    "The answer is 1234.56, isn't it?",
    "def f(x):\n    return x  +  1\t# ok",
    "Größe \u4f60\u597d\u4e16\u754c \u0434\u0430 \U0001f600\n\n",
)


def written_otherwise(folder: Path) -> Path | None:
    """Return the file that a folder without tokenizer.json has its tokenizer in; None without."""
    if (folder / "tokenizer.json").is_file():
        return None
    found = [folder / "tokenizer.model", folder / "tiktoken.model", *folder.glob("*.tiktoken")]
    if (folder / "merges.txt").is_file():
        found.append(folder / "vocab.json")
    return next((path for path in found if path.is_file()), None)


def convert_tokenizer(source: Path, folder: Path, setting: str) -> None:
    """Write the tokenizer.json of a model into a copy of its folder.

    Where it replaces code of the model's, tokenizer_config.json no longer names that code.

    Args:
        source: file of the model's folder, beside tokenizer_config.json and config.json.
        folder: a copy, of those two at least.
        setting: that names the model's folder, for errors.

    Raises:
        ConfigError: a library is missing, transformers cannot convert it, or does so otherwise
            than the library that it was made with.
    """
    missing = [name for name, module in _LIBRARIES.items() if find_spec(module) is None]
    if missing:
        raise ConfigError(
            f"{source.parent} has no tokenizer.json, and {', '.join(missing)} to make one from "
            f"{source.name} is not installed: pip install 'slipstream[conversion]' ({setting})"
        )
    try:
        config = json.loads((source.parent / "tokenizer_config.json").read_bytes())
        with source.open("rb") as file:
            is_tiktoken = _TIKTOKEN.fullmatch(file.readline(1024)) is not None
        tokenizer = _of_tiktoken(source, config) if is_tiktoken else _of_transformers(source)
        tokenizer.save(str(folder / "tokenizer.json"))
        if is_tiktoken:
            config.pop("auto_map", None)
            config["tokenizer_class"] = "PreTrainedTokenizerFast"
            (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    except Exception as error:  # of its libraries, whatever they are
        raise ConfigError(
            f"{source.parent} has no tokenizer.json, and none can be made from {source.name}: "
            f"{(str(error).splitlines() or [''])[0]:.300}. Add one by the library that this "
            f"tokenizer was made with ({setting})"
        ) from error


def _of_transformers(source: Path) -> Any:  # noqa: ANN401 tokenizers.Tokenizer
    from sentencepiece import SentencePieceProcessor
    from transformers import AutoTokenizer

    folder = str(source.parent)
    found = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    tokenizer = found.backend_tokenizer
    if source.suffix == ".model":
        original = SentencePieceProcessor(model_file=str(source))
        for text in _PROBES:
            if tokenizer.encode(text, add_special_tokens=False).ids != original.encode(text):
                raise ValueError(f"transformers makes other tokens of {text!r} than sentencepiece")
    return tokenizer


def _of_tiktoken(source: Path, config: Mapping[str, Any]) -> Any:  # noqa: ANN401 as above
    from tokenizers import AddedToken
    from transformers.convert_slow_tokenizer import TikTokenConverter

    lines = (line.split() for line in source.read_bytes().splitlines() if line)
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    pattern = _pattern(source.parent, config)
    converter = TikTokenConverter(str(source), **({"pattern": pattern} if pattern else {}))
    converter.load_tiktoken_bpe = lambda _file: ranks  # tiktoken's keeps what a path held before
    tokenizer = converter.converted()
    added = {int(number): dict(one) for number, one in config["added_tokens_decoder"].items()}
    for number in range(len(ranks), max(added, default=-1) + 1):
        facts = added.get(number, {"content": f"<|reserved_token_{number}|>", "special": True})
        facts = {key: value for key, value in facts.items() if not key.startswith("__")}
        add = tokenizer.add_special_tokens if facts.get("special") else tokenizer.add_tokens
        add([AddedToken(**facts)])
    for number, facts in added.items():
        if tokenizer.token_to_id(facts["content"]) != number:
            raise ValueError(f"{facts['content']!r} cannot have the number {number}")
    return tokenizer


def _pattern(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Return what splits texts before they are tokens; None is transformers' own, of Llama 3.

    Raises:
        ValueError: it is in code, and cannot be read there.
    """
    import transformers

    named = config.get("auto_map")
    named = named.get("AutoTokenizer") if isinstance(named, dict) else named
    classes = [one for one in (named if isinstance(named, list) else [named]) if one]
    name = config.get("tokenizer_class")
    if not classes and (name is None or hasattr(transformers, name)):
        return None
    for module in {one.partition(".")[0] for one in classes}:
        path = folder / f"{module}.py"
        for node in ast.walk(ast.parse(path.read_text())) if path.is_file() else ():
            match node:
                case ast.Assign(targets=[ast.Name(id="pat_str")], value=ast.Constant(str(text))):
                    return text
                case ast.Assign(
                    targets=[ast.Name(id="pat_str")],
                    value=ast.Call(
                        func=ast.Attribute(value=ast.Constant(str(separator)), attr="join"),
                        args=[ast.List() as parts],
                    ),
                ):
                    return separator.join(ast.literal_eval(parts))
    raise ValueError(f"the pattern of {classes or name} that splits texts is not found (pat_str)")
