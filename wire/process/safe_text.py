"""Foreign text, made safe to show: no terminal obeys it, no log splits it into lines."""


def visible(text: str) -> str:
    """Return text that no terminal obeys: control characters except line ends become symbols."""
    if text.isprintable():
        return text
    return "".join(
        char if char in "\n\t" or char.isprintable() else _named(ord(char)) for char in text
    )


def one_line(text: str, *, most: int) -> str:
    """Return foreign text as one short line: line ends and control characters become spaces."""
    return "".join(char if char.isprintable() else " " for char in text[:most])


def _named(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
