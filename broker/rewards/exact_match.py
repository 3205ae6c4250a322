"""1.0 if the answer is the expected text, else 0.0."""

from collections.abc import Mapping


def score(
    data_source: str,  # noqa: ARG001 part of the interface
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, object],  # noqa: ARG001 part of the interface
) -> float:
    """Compare after stripping white space at both ends.

    Example: ``score("add", " 122", "122", {})`` is 1.0.
    """
    return 1.0 if solution_str.strip() == ground_truth.strip() else 0.0
