"""Supervised warm-up: a policy that was never trained learns just enough to be reinforced.

Reinforcement needs groups in which some answers are right and some are wrong. From random
weights no answer is ever right, so the policy first imitates demonstrations, with the learner's
own model, until a given share of its sampled answers is right.

    python -m learner.warmup --model DIR --demonstrations demos.jsonl --data train.jsonl --out DIR
"""

import argparse
import logging
import random
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]  # not in torch's stubs

from learner import device

device.prepare()

from algos.diagnostics import Sums  # noqa: E402
from algos.linear_logprobs import TokenLogprobs  # noqa: E402
from algos.reduce import token_mean  # noqa: E402
from learner.collate import PackedBatch, TrainSequence, pack  # noqa: E402
from learner.config import LearnerSection  # noqa: E402
from learner.hf_config import load_hf_config  # noqa: E402
from learner.hf_weights import load_hf_weights, save_hf_folder  # noqa: E402
from learner.model import build_model, packed_logits  # noqa: E402
from learner.policy import Policy  # noqa: E402
from learner.topology import destroy_topology, init_topology  # noqa: E402
from wire.errors import ConfigError  # noqa: E402
from wire.logs import start_logging  # noqa: E402
from wire.trajectory import Prompt  # noqa: E402

_log = logging.getLogger(__name__)
_BATCH = 128
_CHECK_EVERY = 10
_CHECKED = 512


class _Answers:
    """Tokenized prompts and answers of a JSONL file."""

    def __init__(self, data: Path, tokenizer: Tokenizer, eos_token_id: int) -> None:
        rows = [msgspec.json.decode(line, type=Prompt) for line in data.read_bytes().splitlines()]
        self._rows = [
            (tokenizer.encode(r.prompt).ids, [*tokenizer.encode(r.ground_truth).ids, eos_token_id])
            for r in rows
        ]
        self.max_answer = max(len(answer) for _, answer in self._rows)

    def choose(self, count: int, rng: random.Random) -> list[tuple[list[int], list[int]]]:
        """Return random pairs of prompt and answer."""
        return rng.choices(self._rows, k=count)


def imitate(policy: Policy, rows: Sequence[tuple[list[int], list[int]]]) -> float:
    """Do one optimizer update towards the given answers; return the loss in nats per token."""
    batch = pack([_sequence(prompt, answer) for prompt, answer in rows], device.device())
    num_tokens = int(batch.loss_mask.sum())

    def loss(_number: int, batch: PackedBatch, said: TokenLogprobs) -> tuple[Tensor, Sums]:
        return token_mean(-said.logprobs, batch.loss_mask, global_num_tokens=num_tokens), {}

    sums, _ = policy.update([batch], loss)
    return float(sums["loss"])


@torch.no_grad()
def accuracy(
    policy: Policy,
    rows: Sequence[tuple[list[int], list[int]]],
    max_answer: int,
    *,
    greedy: bool = False,
) -> float:
    """Return the share of rows that the policy answers rightly, at temperature 1 or greedily."""
    sequences = [list(prompt) for prompt, _ in rows]
    for _ in range(max_answer):
        batch = pack([_sequence(ids, []) for ids in sequences], device.device())
        logits = packed_logits(
            policy.model, batch.token_ids, batch.position_ids, batch.cu_seqlens, batch.max_seqlen
        )
        last = logits[(batch.cu_seqlens[1:] - 1).long()]
        chosen = (
            last.argmax(-1) if greedy else torch.multinomial(last.float().softmax(-1), 1)[:, 0]
        ).tolist()
        for ids, token in zip(sequences, chosen, strict=True):
            ids.append(token)
    right = [
        ids[len(prompt) :][: len(answer)] == answer
        for ids, (prompt, answer) in zip(sequences, rows, strict=True)
    ]
    return sum(right) / len(right)


def _sequence(prompt: list[int], answer: list[int]) -> TrainSequence:
    length = len(prompt) + len(answer)
    return TrainSequence(
        token_ids=np.array(prompt + answer, np.int32),
        loss_mask=np.arange(length) >= len(prompt),
        behavior_logprobs=np.zeros(length, np.float32),
        temperature=1.0,
    )


def warm_up(
    model_folder: Path,
    demonstrations: Path,
    data: Path,
    out: Path,
    *,
    target: float,
    max_s: float,
) -> float:
    """Imitate demonstrations until the target accuracy on ``data``; save; return the accuracy."""
    device.set_threads(2)
    topology = init_topology(
        rank=0,
        world_size=1,
        tensor_parallel=1,
        store=HashStore(),
        seed=0,
        timeout_s=60.0,
    )
    torch.manual_seed(0)
    config = load_hf_config(model_folder)
    model = build_model(config, dtype=torch.float32, extra={})
    if any(model_folder.glob("*.safetensors")):
        load_hf_weights(model, model_folder)
    settings = LearnerSection(lr=1e-3, weight_decay=0.01, adam_beta2=0.95)
    policy = Policy(model, settings, topology)
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    eos_token_id = tokenizer.token_to_id("<eos>")
    if eos_token_id is None:
        raise ConfigError(f"the tokenizer of {model_folder} has no token <eos>")
    rows = _Answers(demonstrations, tokenizer, eos_token_id)
    rng = random.Random(0)  # noqa: S311 not for secrets
    checked = _Answers(data, tokenizer, eos_token_id).choose(_CHECKED, rng)
    started = time.monotonic()
    reached, updates = 0.0, 0
    while reached < target and time.monotonic() - started < max_s:
        loss = imitate(policy, rows.choose(_BATCH, rng))
        updates += 1
        if updates % _CHECK_EVERY == 0:
            reached = accuracy(policy, checked, rows.max_answer)
            if updates % (10 * _CHECK_EVERY) == 0:
                _log.info("%d updates, loss %.3f, sampled accuracy %.3f", updates, loss, reached)
    save_hf_folder(model, out, model_folder)
    _log.info(
        "sampled accuracy %.3f, greedy %.3f after %d updates in %.0f s",
        reached,
        accuracy(policy, checked, rows.max_answer, greedy=True),
        updates,
        time.monotonic() - started,
    )
    destroy_topology()
    return reached


def main() -> int:
    """Parse and run."""
    parser = argparse.ArgumentParser(description="supervised warm-up of a small policy")
    parser.add_argument("--model", type=Path, required=True, help="folder with config, tokenizer")
    parser.add_argument(
        "--demonstrations", type=Path, required=True, help="JSONL prompts with answers to imitate"
    )
    parser.add_argument(
        "--data", type=Path, required=True, help="JSONL prompts with the right answers"
    )
    parser.add_argument("--out", type=Path, required=True, help="where the warm policy goes")
    parser.add_argument("--target", type=float, default=0.2, help="sampled accuracy to stop at")
    parser.add_argument("--max-seconds", type=float, default=240.0, help="stop here at the latest")
    arguments = parser.parse_args()
    start_logging("warm-up")
    reached = warm_up(
        arguments.model,
        arguments.demonstrations,
        arguments.data,
        arguments.out,
        target=arguments.target,
        max_s=arguments.max_seconds,
    )
    return 0 if reached >= arguments.target else 1


if __name__ == "__main__":
    raise SystemExit(main())
