"""A hash of everything that determines token ids: equal for roles and models that agree."""

import hashlib
import json
from pathlib import Path
from typing import Any

from slipstream.wire.errors import ConfigError

_NO_PART = ("truncation", "padding")  # settings of a call; we switch both off
_HEX_DIGITS = 32


def tokenizer_hash(folder: Path) -> str:
    """Return the hash of a Hugging Face folder's tokenizer.

    It is of the content, not of the bytes: order of keys, white space and the two ways to
    write a merge make no difference.

    Raises:
        ConfigError: there is no tokenizer.json, or it is not JSON.
    """
    path = folder / "tokenizer.json"
    try:
        content = _canonical(json.loads(path.read_bytes()))
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    except OSError as error:
        raise ConfigError(f"no tokenizer.json in {folder} (run.model)") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON (run.model): {error}") from error
    return hashlib.sha256(canonical.encode()).hexdigest()[:_HEX_DIGITS]


def numbered_tokens(folder: Path) -> list[str] | dict[str, int]:
    """Return the tokens of a Hugging Face folder's tokenizer with their numbers.

    Added tokens are left out: fine-tuned models rename spare ones.
    Empty if there is no tokenizer.json with a vocabulary.
    """
    try:
        vocabulary = json.loads((folder / "tokenizer.json").read_bytes())["model"]["vocab"]
        if isinstance(vocabulary, list):  # tokens and their scores, in order
            return [str(token) for token, *_ in vocabulary]
        return {str(token): int(number) for token, number in vocabulary.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def _canonical(content: Any) -> Any:  # noqa: ANN401 JSON
    if not isinstance(content, dict):
        return content
    kept = {key: value for key, value in content.items() if key not in _NO_PART}
    model = kept.get("model")
    if isinstance(model, dict) and isinstance(model.get("merges"), list):
        kept["model"] = {**model, "merges": [_pair(merge) for merge in model["merges"]]}
    return kept


def _pair(merge: Any) -> Any:  # noqa: ANN401 JSON
    return merge.split(" ") if isinstance(merge, str) else merge
