"""1.0 if the answer is the expected text, else 0.0."""

import json

from slipstream.broker.rewards.sdk import Prompt, Transcript, reads, reward, truth_of


def read_texts(prompt: Prompt) -> list[str]:
    """Return the texts that are right.

    Raises:
        ValueError: the list is empty, or one of its texts.
    """
    truth = truth_of(prompt)
    truths = truth if isinstance(truth, list | tuple) else [truth]
    if not truths or any(value is None or not str(value).strip() for value in truths):
        raise ValueError(f"ground_truth holds no text to compare with: {truth!r:.200}")
    texts = (t if isinstance(t, str) else json.dumps(t, ensure_ascii=False) for t in truths)
    return [text.strip() for text in texts]


@reads(read_texts)
@reward(version="2")
def score(transcript: Transcript) -> float:
    """Compare after stripping white space at both ends.

    Any answer of a list of truths is right. A number or an object is compared as JSON writes it.

    Example: an answer of `` 122`` is right where ``ground_truth`` is ``122``, ``"122"`` or
    ``["122", "one"]``.

    Raises:
        Unavailable: there is no truth.
        ValueError: it is empty.
    """
    return float(transcript.response.strip() in read_texts(transcript.prompt))
