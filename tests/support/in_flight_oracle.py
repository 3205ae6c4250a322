"""What the logprobs of answers must be whose weights changed: by the learner and by transformers.

Usage: in_flight_oracle BARRED_TOKEN_ID MODEL_FOLDER...
Reads one question per line from stdin, writes one answer per line to stdout, both JSON.

{"model": FOLDER, "sequences": [[token, ..], ..]}: per sequence, the logprobs of all tokens but
the first, by the learner's own model in one packed forward pass. [[logprob, ..], ..]

{"sequence": [token, ..], "runs": [[first, FOLDER], ..]}: the same of one sequence whose tokens
from each ``first`` on (the first run's is 1) were chosen by another model, while the keys and
values (and recurrent states) of the tokens before were kept as the models before had computed them.
[logprob, ..]

The barred token cannot be chosen: its logit is minus infinity. "barred": null bars none.
"""

import json
import os
import sys
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.learner.model import device
from tests.support.waiting import HANG_S


def next_logprobs(logits: Tensor, targets: Tensor, barred: int | None) -> list[float]:
    """Return the logprob of each target [T] after the logits [T, V]."""
    logits = logits.float().clone()
    if barred is not None:
        logits[:, barred] = float("-inf")
    logprobs: list[float] = logits.log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1).tolist()
    return logprobs


class LearnersModels:
    """The learner's own model of each folder."""

    def __init__(self, folders: list[Path], barred: int) -> None:
        from torch.distributed import HashStore  # type: ignore[attr-defined]

        from slipstream.learner.model.gpt import build_model
        from slipstream.learner.model.topology import init_topology
        from slipstream.learner.model.weights.hf_weights import load_hf_weights
        from slipstream.wire.models.hf_config import load_hf_config

        self._barred = barred
        self._models: dict[str, Any] = {}
        init_topology(rank=0, world_size=1, store=HashStore(), seed=0, timeout_s=HANG_S)
        for folder in folders:
            model = build_model(load_hf_config(folder), dtype=torch.float32, extra={})
            load_hf_weights(model, folder)
            self._models[str(folder)] = model

    def logprobs(self, folder: str, sequences: list[list[int]]) -> list[list[float]]:
        from tests.support.logits import packed_logits

        model = self._models[folder]
        lengths = [len(sequence) for sequence in sequences]
        tokens = torch.tensor([token for sequence in sequences for token in sequence])
        positions = torch.cat([torch.arange(length) for length in lengths])
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
        logits = packed_logits(model, tokens, positions, cu_seqlens, lengths)
        logits = logits[:, : model.hf_config.vocab_size]
        return [
            next_logprobs(part[:-1], torch.tensor(sequence[1:]), self._barred)
            for part, sequence in zip(logits.split(lengths), sequences, strict=True)
        ]


class KeptCache:
    """Models that continue over the keys and values that another one computed."""

    def __init__(self, folders: list[Path]) -> None:
        from transformers import AutoModelForCausalLM

        self._models = {
            str(folder): AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            for folder in folders
        }

    def logprobs(
        self, sequence: list[int], runs: list[tuple[int, str]], barred: int | None
    ) -> list[float]:
        from transformers.cache_utils import DynamicCache

        tokens = torch.tensor([sequence])
        kept = DynamicCache(config=self._models[runs[0][1]].config)
        logits: list[Tensor] = []
        ends = [first - 1 for first, _ in runs[1:]] + [len(sequence) - 1]
        start = 0
        for (_, folder), end in zip(runs, ends, strict=True):
            # What chose token t computed the keys and values of token t - 1.
            model = self._models[folder]
            output = model(tokens[:, start:end], past_key_values=kept, use_cache=True)
            logits.append(output.logits[0])
            start = end
        return next_logprobs(torch.cat(logits), tokens[0, 1:], barred)


def main(barred: int, folders: list[Path]) -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no answer
    device.prepare()
    device.set_threads(1)
    learner, kept = cache(partial(LearnersModels, folders, barred)), KeptCache(folders)
    for line in sys.stdin:
        question = json.loads(line)
        with torch.no_grad():
            answer: object = (
                learner().logprobs(question["model"], question["sequences"])
                if "model" in question
                else kept.logprobs(
                    question["sequence"], question["runs"], question.get("barred", barred)
                )
            )
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]), [Path(folder) for folder in sys.argv[2:]])
