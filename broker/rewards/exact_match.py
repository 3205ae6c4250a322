"""1.0 if the answer is the expected text, else 0.0."""

import json
from collections.abc import Mapping

from slipstream.wire.messages.trajectory import Json


def score(
    data_source: str,  # noqa: ARG001 part of the interface
    solution_str: str,
    ground_truth: Json,
    extra_info: Mapping[str, object],  # noqa: ARG001 part of the interface
) -> float:
    """Compare after stripping white space at both ends.

    A list of truths holds answers of which any is right. A number or an object is compared as
    JSON writes it.

    Example: ``score("add", " 122", "122", {})`` and ``score("add", "122", [122, "one"], {})``
    are 1.0.

    Raises:
        ValueError: there is no truth.
    """
    truths = ground_truth if isinstance(ground_truth, list | tuple) else [ground_truth]
    if not truths or None in truths:
        raise ValueError(f"ground_truth holds no text to compare with: {ground_truth!r:.200}")
    texts = (one if isinstance(one, str) else json.dumps(one, ensure_ascii=False) for one in truths)
    return float(solution_str.strip() in [text.strip() for text in texts])
