"""Makes the tokenizer.json of a tokenizer that is written otherwise, as transformers reads it.

Code in the folder of a model is read for the pattern that splits its texts, and never run.
"""

import ast
import base64
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from slipstream.wire.errors import ConfigError

# Module of each library.
_LIBRARIES = {
    "transformers": "transformers",
    "sentencepiece": "sentencepiece",
    "protobuf": "google",
}
_TIKTOKEN = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?\n")  # a line of it: token and rank
_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")  # in its config
_Named = dict[str, list[ast.expr | None]]  # values of names; None is one that is not understood
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
        source: File of the model's folder, next to config.json.
        folder: Copy of the model's folder, at least of the small files.
        setting: Setting with the model's folder, for errors.

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
        with source.open("rb") as file:
            is_tiktoken = _TIKTOKEN.fullmatch(file.readline(1024)) is not None
        if not is_tiktoken:
            _of_transformers(source).save(str(folder / "tokenizer.json"))
        else:
            config = json.loads((source.parent / "tokenizer_config.json").read_bytes())
            _of_tiktoken(source, config).save(str(folder / "tokenizer.json"))
            config.pop("auto_map", None)
            config["tokenizer_class"] = "PreTrainedTokenizerFast"
            (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    except Exception as error:  # any error of its libraries
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
    added = _added_tokens(source.parent, config)
    for number in range(len(ranks), max(added, default=-1) + 1):
        facts = added.get(number, {"content": f"<|reserved_token_{number}|>", "special": True})
        facts = {key: value for key, value in facts.items() if not key.startswith("__")}
        add = tokenizer.add_special_tokens if facts.get("special") else tokenizer.add_tokens
        add([AddedToken(**facts)])
    for number, facts in added.items():
        if tokenizer.token_to_id(facts["content"]) != number:
            raise ValueError(f"{facts['content']!r} cannot have the number {number}")
    return tokenizer


def _added_tokens(folder: Path, config: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Return the tokens that tiktoken's file lacks: number and facts, as of AddedToken.

    Raises:
        ValueError: the end of an answer, or some such, is a token that no file gives a number.
    """
    if (decoder := config.get("added_tokens_decoder")) is not None:
        return {int(number): dict(facts) for number, facts in decoder.items()}
    path = folder / "added_tokens.json"
    numbers: dict[str, int] = json.loads(path.read_bytes()) if path.is_file() else {}
    named = [token for key, token in config.items() if key in _SPECIAL_TOKENS and token]
    named += config.get("additional_special_tokens") or []
    texts = {token["content"] if isinstance(token, dict) else token for token in named}
    if missing := texts - numbers.keys():
        raise ValueError(
            f"no number is given for {min(missing)!r}, in added_tokens_decoder of "
            "tokenizer_config.json or in added_tokens.json"
        )
    return {n: {"content": text, "special": text in texts} for text, n in numbers.items()}


def _pattern(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Return what splits texts before they are tokens; None is transformers' own, of Llama 3.

    Raises:
        ValueError: it is in code, and cannot be read there.
    """
    import transformers

    named = config.get("auto_map")
    named = named.get("AutoTokenizer") if isinstance(named, dict) else named
    classes = [name for name in (named if isinstance(named, list) else [named]) if name]
    name = config.get("tokenizer_class")
    if not classes and (name is None or hasattr(transformers, name)):
        return None
    for module in {name.partition(".")[0] for name in classes}:
        path = folder / f"{module}.py"
        if path.is_file() and (pattern := pattern_of(path.read_text())):
            return pattern
    raise ValueError(f"the pattern of {classes or name} that splits texts is not found (pat_str)")


def pattern_of(code: str) -> str:
    """Return the pattern that code hands over as ``pat_str``, or calls so; empty if none is plain.

    A plain one is made of literals, names and joins, and has no other value anywhere in the code.

    Raises:
        SyntaxError: it is no Python.
    """
    nodes = list(ast.walk(ast.parse(code)))
    reads = [node for node in nodes if isinstance(getattr(node, "ctx", None), ast.Load)]
    num_reads = Counter(getattr(node, "id", getattr(node, "attr", "")) for node in reads)
    values = {id(target): value for node in nodes for target, value in _assigned(node)}
    named: _Named = {}
    for node in nodes:
        if name := _bound(node):
            value = values.get(id(node))
            if isinstance(value, ast.List) and num_reads[name] > 1:
                value = None  # it may grow before it is joined
            named.setdefault(name, []).append(value)
    pattern = _value_of("pat_str=" if "pat_str=" in named else "pat_str", named)
    return pattern if isinstance(pattern, str) else ""


def _assigned(node: ast.AST) -> list[tuple[ast.AST | None, ast.expr]]:
    """Return what a piece of code gives a value, and the value."""
    match node:
        case ast.Assign(targets, value):
            return [(target, value) for target in targets]
        case ast.AnnAssign(target, _, value):
            return [(target, value or target)]  # without a value it says nothing new
        case ast.NamedExpr(target, value):
            return [(target, value)]
        case ast.keyword(value=value):
            return [(node, value)]
        case ast.Dict(keys, values):
            return list(zip(keys, values, strict=True))
    return []


def _bound(node: ast.AST) -> str:
    """Return the name that a piece of code gives a meaning; an argument's has ``=`` at its end."""
    match node:
        case ast.Name(name, ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
            return name
        case ast.arg(name) | ast.FunctionDef(name):
            return name
        case ast.alias(name, as_name):
            return as_name or name
        case ast.ClassDef(name):
            return f"class {name}"
        case ast.keyword(str(name)):
            return f"{name}="
        case ast.Constant("pat_str"):  # a key in a dictionary of arguments, for example
            return "pat_str="
    return ""


def _value_of(name: str, named: _Named) -> str | tuple[str, ...] | None:
    """Return the one text, or texts, that a name means wherever it is given a value, if it does."""
    others = {key: values for key, values in named.items() if key != name}
    found = {
        _value(value, others) for value in named.get(name, ()) if not _is_same(value, name, named)
    }
    return found.pop() if len(found) == 1 else None


def _is_same(node: ast.expr | None, name: str, named: _Named) -> bool:
    """True if a value is that of the name itself, or that compiled."""
    match node:
        case ast.Call(ast.Attribute(ast.Name("re" | "regex"), "compile"), [compiled]):
            return _is_same(compiled, name, named)
    return node is not None and _own_name(node, named) == name


def _own_name(node: ast.expr, named: _Named) -> str:
    """Return the name of a variable, or of an attribute of a class here; empty for all else."""
    match node:
        case ast.Name(name):
            return name
        case ast.Attribute(ast.Name(owner), name) if (
            owner in {"self", "cls"} or f"class {owner}" in named
        ):
            return name
    return ""


def _value(node: ast.expr | None, named: _Named) -> str | tuple[str, ...] | None:
    """Return the one text, or texts, that an expression of literals and names means, if it does."""
    match node:
        case ast.Constant(str(text)):
            return text
        case ast.Name() | ast.Attribute():
            return _value_of(_own_name(node, named), named)
        case ast.List(parts) | ast.Tuple(parts):
            return _texts(parts, named)
        case ast.BinOp(left, ast.Add(), right):
            both = _texts([left, right], named)
            return "".join(both) if both else None
        case ast.Call(ast.Attribute(separator, "join"), [joined]):
            match _value(separator, named), _value(joined, named):
                case str(between), tuple(texts):
                    return between.join(texts)
    return None


def _texts(nodes: Sequence[ast.expr], named: _Named) -> tuple[str, ...] | None:
    texts = [text for node in nodes if isinstance(text := _value(node, named), str)]
    return tuple(texts) if len(texts) == len(nodes) else None
