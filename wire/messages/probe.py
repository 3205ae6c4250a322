"""The probe of a version: what its learner computes of a few fixed sequences of tokens."""

import msgspec

from slipstream.wire.messages.bounds import Count, Figure, Several


class ProbeLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Sequences of tokens, and the learner's logprobs of them under one version."""

    sequences: Several[Several[Count]]  # S of equal length L
    logprobs: Several[Several[Figure]]  # [S, L - num_context], nats, at temperature 1
    num_context: Count  # leading tokens of each sequence without a logprob

    def __post_init__(self) -> None:
        lengths = {len(sequence) for sequence in self.sequences}
        if len(lengths) != 1 or not 0 < self.num_context < min(lengths):
            raise ValueError(
                f"a probe has sequences of one length above num_context = {self.num_context}, "
                f"got {sorted(lengths)}"
            )
        counts = [len(logprobs) for logprobs in self.logprobs]
        if counts != [lengths.pop() - self.num_context] * len(self.sequences):
            raise ValueError(f"a probe of {len(self.sequences)} sequences has logprobs {counts}")
