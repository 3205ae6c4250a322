"""How the trainer of a chaos run gives its generators the version that they are to run."""

from pathlib import Path

from slipstream.wire.messages.versions import PolicyVersion, parse_label


def publish(folder: Path, version: PolicyVersion) -> None:
    temporary = folder / ".published.new"
    temporary.write_text(version.label)
    temporary.replace(folder / "published")


def published(folder: Path) -> PolicyVersion | None:
    path = folder / "published"
    return parse_label(path.read_text()) if path.exists() else None
