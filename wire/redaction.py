"""Texts of others, such as the errors of drivers, without the secrets in them."""

import re

_USER = r"(?<=://)(?:[^/\s@]{0,512}|[^/\s:@]{0,512}:(?!\d+/)[^\s@]{0,512})@"
_QUERY = r"\?[^\s\"']*"
_ADDRESSES = re.compile(f"{_USER}|{_QUERY}")
_QUOTED = r"\\*\"[^\"]*(?:\"|$)|\\*'[^']*(?:'|$)"
_HEADERS = r"(?:proxy-?)?authorization|(?:set-?)?cookie"
_NAMES = (
    r"secrets?|token|pass(?:word|wd|phrase|code)?|pwd|credentials?|signature|sig|auth"
    r"|(?:secret|access|account|api|private|shared|storage|session|signing|subscription|encryption"
    r"|customer|client|master)[_-]?key|connection[_-]?string"
)
_IS = (  # between a name and its value, in texts, XML and tuples
    r"(?:\\*[\"']?\s*(?::?=>?|:(?!//)|%3D)\s*|>|\\*[\"']\s*,\s*(?=[bu]?\\*[\"']))"
)
_WORD = r"[^\s,;&\"'<>()\[\]{}]+"
_NAMED = re.compile(
    rf"(?<![\w.-])(?<!</)(?:([\w.-]{{0,64}}?(?:{_HEADERS}){_IS})(?:[bu]?(?:{_QUOTED})|.+)"
    rf"|([\w.-]{{0,64}}?(?:{_NAMES}){_IS})(?:[bu]?(?:{_QUOTED})|{_WORD}))",
    re.IGNORECASE,
)
_SCHEMES = re.compile(r"\b(Bearer|Basic)\s+(?=\S*[\d=])[\w.~+/=-]+", re.IGNORECASE)
_MARK = "***"


def without_secrets(text: str) -> str:
    """Return a text without users and queries of addresses and values of what is named as secret.

    Names are those such as ``SecretKey=``, ``"password": `` or ``Authorization: ``; a value that
    no name or scheme marks as secret stays.
    """
    text = _ADDRESSES.sub("", text)
    text = _NAMED.sub(lambda match: f"{match[1] or match[2]}{_MARK}", text)
    return _SCHEMES.sub(rf"\1 {_MARK}", text)
