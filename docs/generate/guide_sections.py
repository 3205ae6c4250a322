"""What the page shows under "why": the sections of the diagnosis guide that rules lead to.

python -m docs.generate.guide_sections > broker/dashboard/page/why.json
"""

import json
import re
import sys
from pathlib import Path

from slipstream.broker.advisories.advise import RULES

GUIDE = Path(__file__).parents[2] / "docs" / "operations.md"
_HEADING = re.compile(r"^#+ (.+)$", flags=re.MULTILINE)


def sections(guide: str) -> dict[str, dict[str, str]]:
    """Return the title and the text of each rule's section, by the rule.

    Args:
        guide: in Markdown; each rule has a heading of its name.

    Raises:
        KeyError: a rule has none.
    """
    parts = _HEADING.split(guide)
    by_name = {
        re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-"): {
            "title": title,
            "text": _plain(text),
        }
        for title, text in zip(parts[1::2], parts[2::2], strict=True)
    }
    return {rule: by_name[rule] for rule in sorted(RULES)}


def _plain(text: str) -> str:
    """Return Markdown as a person reads it, a line per paragraph."""
    unlinked = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", text)
    plain = re.sub(r"\*\*([^*]+)\*\*", r"\1:", unlinked).replace("`", "")
    paragraphs = re.split(r"\n\s*\n", plain.strip())
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def reference() -> str:
    """Return the file."""
    return json.dumps(sections(GUIDE.read_text("utf-8")), indent=1) + "\n"


def main() -> int:
    """Print the file."""
    sys.stdout.write(reference())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
