"""What the warm-up does: a policy imitates demonstrations until enough of its answers are right.

What update N trains on and what is sampled after it depend on N alone. So a warm-up that was cut
off and resumed makes the policy, bit for bit, that an uninterrupted one makes in equal processes.

Shapes: T tokens of B sequences laid end to end.
"""

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]  # not in torch's stubs

from slipstream.learner.model import device

device.prepare()

from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed  # noqa: E402

from docs.generate.policy.progress import Progress, digests  # noqa: E402
from slipstream.algos.compose import PolicyOutputs  # noqa: E402
from slipstream.algos.diagnostics import Sums  # noqa: E402
from slipstream.algos.reduce import masked_sum  # noqa: E402
from slipstream.learner.batches.packing import PackedBatch, TrainTrajectory, pack  # noqa: E402
from slipstream.learner.config import LearnerSection  # noqa: E402
from slipstream.learner.model.gpt import build_model  # noqa: E402
from slipstream.learner.model.topology import Topology, destroy_topology, init_topology  # noqa: E402
from slipstream.learner.model.weights.hf_weights import load_hf_weights, save_hf_folder  # noqa: E402
from slipstream.learner.training.policy import Policy  # noqa: E402
from slipstream.wire.errors import ConfigError, SlipstreamError  # noqa: E402
from slipstream.wire.messages.trajectory import Prompt  # noqa: E402
from slipstream.wire.models.hf_config import load_hf_config  # noqa: E402
from tests.support.logits import packed_logits  # noqa: E402

_log = logging.getLogger(__name__)
_SETTINGS = LearnerSection(lr=1e-3, weight_decay=0.01, adam_beta2=0.95)
_BATCH = 128  # demonstrations per update
_CHECK_EVERY = 10  # updates
_KEEP_EVERY = 50  # updates; a multiple of _CHECK_EVERY
_CHECKED = 512  # answers sampled per check
_MEASURED_SAMPLES = 8  # answers per problem of a final measurement
_SEED = 0
_THREADS = 1  # the policy does not depend on how many cores there are
_END_TOKEN = "<eos>"  # noqa: S105 no secret


class TargetMissedError(SlipstreamError):
    """The policy did as many updates as it was allowed, and is not right often enough."""


@dataclass(frozen=True, kw_only=True)
class WarmUp:
    """One warm-up."""

    model: Path  # Hugging Face folder, with or without weights
    demonstrations: Path  # JSONL, imitated
    data: Path  # JSONL with right answers
    held_out: Path | None = None  # more of these, measured at the end
    out: Path
    target: float  # share of sampled answers that must be right
    max_updates: int
    dtype: Literal["bfloat16", "float32"] = "bfloat16"  # of what is written


@dataclass(frozen=True)
class Accuracy:
    """Shares of right answers: taking the likeliest token each time, and sampling."""

    greedy: float
    sampled: float  # at temperature 1


@dataclass(frozen=True)
class Row:
    """A tokenized problem."""

    prompt: list[int]
    answer: list[int]  # with the token that ends it


def read_rows(file: Path, model: Path, option: str) -> list[Row]:
    """Return the problems in a JSONL file, as a model's tokenizer cuts them.

    Raises:
        ConfigError: naming the file and the option that gave it.
    """
    tokenizer_file = model / "tokenizer.json"
    if not tokenizer_file.is_file():
        raise ConfigError(f"no tokenizer.json in {model} (--model)")
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    end = tokenizer.token_to_id(_END_TOKEN)
    if end is None:
        raise ConfigError(f"{tokenizer_file} has no token {_END_TOKEN} (--model)")
    rows = []
    try:
        for number, line in enumerate(file.read_bytes().splitlines(), 1):
            row = msgspec.json.decode(line, type=Prompt)
            if not isinstance(row.prompt, str) or not isinstance(row.ground_truth, str):
                raise ConfigError(
                    f"{file}, line {number}: prompt and ground_truth must be text ({option})"
                )
            answer = [*tokenizer.encode(row.ground_truth).ids, end]
            rows.append(Row(tokenizer.encode(row.prompt).ids, answer))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror} ({option})") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{file}, line {len(rows) + 1}: {error} ({option})") from error
    if not rows:
        raise ConfigError(f"{file} holds no rows ({option})")
    return rows


def imitate(policy: Policy, rows: Sequence[Row]) -> None:
    """Do one optimizer update towards the given answers."""
    batch = pack([_sequence(row.prompt, row.answer) for row in rows], device.device())
    num_tokens = int(batch.loss_mask.sum())

    def loss(_number: int, batch: PackedBatch, outputs: PolicyOutputs) -> tuple[Tensor, Sums]:
        return masked_sum(-outputs.logprobs, batch.loss_mask) / num_tokens, {}

    policy.update([batch], loss)


@torch.no_grad()
def share_right(model: GPTModel, rows: Sequence[Row], *, seed: int | None) -> float:
    """Return the share of rows answered rightly: sampled with this seed, or greedily with None."""
    generator = torch.Generator(device=device.device())
    if seed is not None:
        generator.manual_seed(seed)
    sequences = [list(row.prompt) for row in rows]
    for _ in range(max(len(row.answer) for row in rows)):
        batch = pack([_sequence(ids, []) for ids in sequences], device.device())
        logits = packed_logits(
            model, batch.token_ids, batch.position_ids, batch.cu_seqlens, batch.lengths
        )
        last = logits[(batch.cu_seqlens[1:] - 1).long()]
        chosen = (
            last.argmax(-1)
            if seed is None
            else torch.multinomial(last.float().softmax(-1), 1, generator=generator)[:, 0]
        )
        for ids, token in zip(sequences, chosen.tolist(), strict=True):
            ids.append(token)
    right = [
        ids[len(row.prompt) :][: len(row.answer)] == row.answer
        for ids, row in zip(sequences, rows, strict=True)
    ]
    return sum(right) / len(right)


def _sequence(prompt: list[int], answer: list[int]) -> TrainTrajectory:
    length = len(prompt) + len(answer)
    return TrainTrajectory(
        token_ids=np.array(prompt + answer, np.int32),
        loss_mask=np.arange(length) >= len(prompt),
        behavior_logprobs=np.zeros(length, np.float32),
        temperature=1.0,
    )


def measure(model: GPTModel, rows: Sequence[Row]) -> Accuracy:
    """Return how often a policy is right: greedily once, sampled several times per row."""
    sampled = [share_right(model, rows, seed=seed) for seed in range(_MEASURED_SAMPLES)]
    return Accuracy(share_right(model, rows, seed=None), sum(sampled) / len(sampled))


def measure_folder(folder: Path, data: Path) -> Accuracy:
    """Return how often the policy in a Hugging Face folder is right about the rows of a file."""
    rows = read_rows(data, folder, "--data")
    with _alone():
        return measure(_filled_model(folder), rows)


def warm_up(job: WarmUp, *, is_stopped: Callable[[], bool]) -> bool:
    """Imitate demonstrations until the target is reached, then write the policy.

    Returns:
        Whether it is written; if not, ``is_stopped`` cut it off, and its progress is kept.

    Raises:
        ConfigError: something in the inputs cannot be used.
        TargetMissedError: the target was not reached; the progress is kept.
    """
    demonstrations = read_rows(job.demonstrations, job.model, "--demonstrations")
    data = read_rows(job.data, job.model, "--data")
    held_out = read_rows(job.held_out, job.model, "--held-out") if job.held_out else None
    checked = random.Random(_SEED).choices(data, k=_CHECKED)  # noqa: S311 not for secrets
    files = {"--demonstrations": [job.demonstrations], "--data": [job.data]}
    files["--model"] = [path for path in sorted(job.model.iterdir()) if path.is_file()]
    recipe = msgspec.json.encode([_SETTINGS, _BATCH, _SEED])
    dtype = getattr(torch, job.dtype)
    with _alone() as topology:
        progress = Progress(job.out, digests(files, recipe), topology)
        policy, updates = progress.resume(lambda: _new_policy(job.model, topology))
        if not _imitate_until(job, policy, updates, demonstrations, checked, progress, is_stopped):
            return False
        save_hf_folder(policy.model, job.out, job.model, dtype=dtype)
        progress.remove()
        _log.info("wrote %s", job.out)
        if held_out is not None:
            with torch.no_grad():  # the values that a file of this type holds are measured
                for parameter in policy.model.parameters():
                    parameter.copy_(parameter.to(dtype))
            found = measure(policy.model, held_out)
            _log.info("held out: greedy accuracy %.3f, sampled %.3f", found.greedy, found.sampled)
    return True


def _imitate_until(
    job: WarmUp,
    policy: Policy,
    updates: int,
    demonstrations: Sequence[Row],
    checked: Sequence[Row],
    progress: Progress,
    is_stopped: Callable[[], bool],
) -> bool:
    """Train until the target is reached; return False if stopped before, with progress kept."""
    began_at = updates
    while True:
        if updates % _CHECK_EVERY == 0 or updates >= job.max_updates:
            reached = share_right(policy.model, checked, seed=updates)
            is_right = reached >= job.target
            if updates % _KEEP_EVERY == 0 or is_right:
                _log.info("%d updates, sampled accuracy %.3f of %.3f", updates, reached, job.target)
            if is_right:
                return True
            if updates >= job.max_updates:
                progress.keep(policy, updates)
                raise TargetMissedError(
                    f"{updates} updates (--max-updates) make the policy right in {reached:.3f} of "
                    f"its sampled answers, --target is {job.target:g}. The progress is in "
                    f"{progress.folder}: call again with more --max-updates or a lower --target. "
                    "If the accuracy no longer rises, the demonstrations do not lead there"
                )
        stops = is_stopped()
        if stops or (updates % _KEEP_EVERY == 0 and updates > began_at):
            progress.keep(policy, updates)
        if stops:
            _log.info("stopped: the same call resumes from %d updates", updates)
            return False
        rows = random.Random(updates).choices(demonstrations, k=_BATCH)  # noqa: S311 not for secrets
        imitate(policy, rows)
        updates += 1


@contextmanager
def _alone() -> Iterator[Topology]:
    """Be the only rank of a learner."""
    device.set_threads(_THREADS)
    topology = init_topology(rank=0, world_size=1, store=HashStore(), seed=_SEED, timeout_s=60.0)
    try:
        yield topology
    finally:
        destroy_topology()


def _new_policy(folder: Path, topology: Topology) -> Policy:
    """Return the policy before its first update; the same one each time."""
    torch.manual_seed(_SEED)
    model_parallel_cuda_manual_seed(_SEED)
    return Policy(_filled_model(folder), _SETTINGS, topology)


def _filled_model(folder: Path) -> GPTModel:
    model = build_model(load_hf_config(folder), dtype=torch.float32, extra={})
    if any(folder.glob("*.safetensors")):
        load_hf_weights(model, folder)
    return model
