"""Pure: the sequences of a run's probe."""

import hashlib

import numpy as np


def probe_sequences(
    seed: str, *, vocab_size: int, count: int, length: int
) -> tuple[tuple[int, ...], ...]:
    """Return random tokens of a vocabulary, [S, L]; equal seeds give equal tokens anywhere.

    The vocabulary's last token is left out: SGLang 0.5.23 answers with token 0's logprob for it.
    """
    digest = hashlib.sha256(seed.encode()).digest()
    generator = np.random.Generator(np.random.PCG64(int.from_bytes(digest, "little")))
    tokens = generator.integers(0, max(1, vocab_size - 1), size=(count, length))
    return tuple(tuple(row) for row in tokens.tolist())
