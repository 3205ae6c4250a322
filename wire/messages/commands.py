"""Commands of tenants: what a command server hands to learner and engines, and their answers.

A model's commands are numbered from 0, which makes it. A learner says how far each model is and
gets the command after that; so neither side remembers what the other was given.

Shapes: N tokens of a datum, K targets of each.
"""

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct

from slipstream.wire.messages.bounds import (
    MOST_ITEMS,
    Blob,
    ByName,
    Count,
    Figure,
    Name,
    Number,
    Several,
    Text,
)

LossName = Literal["cross_entropy", "importance_sampling", "ppo", "cispo", "dro"]
Decay: TypeAlias = Annotated[float, Meta(ge=0, le=1 - 2**-20)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=3600)]


class LoraSpec(Struct, frozen=True, kw_only=True):
    """The adapters of one model."""

    rank: Annotated[int, Meta(ge=1, le=8192)]
    alpha: Annotated[float, Meta(ge=1e-6, le=1e6)]
    targets: Several[Name]  # sorted; last parts of the names of layers
    seed: Number = 0


# ---- commands of a model ------------------------------------------------------------------------


class Datum(Struct, frozen=True, kw_only=True):
    """A sequence and what its loss reads. Arrays are little-endian bytes."""

    tokens: Blob  # [N] int32
    targets: Blob  # [N, K] int32, what follows each token
    inputs: ByName[Blob]  # [N, K] float32 each
    width: Annotated[int, Meta(ge=1, le=MOST_ITEMS)] = 1  # K


class CreateModel(Struct, frozen=True, kw_only=True, tag=True):
    """Make a model: A from the seed, B = 0."""

    spec: LoraSpec


class LoadWeights(Struct, frozen=True, kw_only=True, tag=True):
    """Take the adapters of a checkpoint, and its optimizer if that is wanted."""

    spec: LoraSpec
    digest: Name
    with_optimizer: bool


class Forward(Struct, frozen=True, kw_only=True, tag=True):
    """Compute a loss; with ``backward`` add its gradient to those that wait for a step."""

    data: Several[Datum]
    loss: LossName
    options: ByName[Figure] = {}
    backward: bool = True


class OptimStep(Struct, frozen=True, kw_only=True, tag=True):
    """Update the adapters by AdamW with the gradients since the last step, then forget these."""

    lr: Annotated[float, Meta(ge=0, le=1e6)]
    beta1: Decay
    beta2: Decay
    epsilon: Annotated[float, Meta(ge=0, le=1e6)]
    weight_decay: Annotated[float, Meta(ge=0, le=1e6)]
    clip: Annotated[float, Meta(ge=0, le=1e30)] = (
        0.0  # largest norm of the gradient; 0 does not clip
    )


class SaveWeights(Struct, frozen=True, kw_only=True, tag=True):
    """Keep the model as it is: with its optimizer, or as a PEFT folder for engines."""

    kind: Literal["training", "sampler"]


Operation: TypeAlias = CreateModel | LoadWeights | Forward | OptimStep | SaveWeights


# ---- commands of an engine ----------------------------------------------------------------------


class Sample(Struct, frozen=True, kw_only=True, tag=True):
    """Answer a prompt under one version of adapters."""

    version: Name  # digest of a PEFT folder; empty for the base model
    tokens: Blob  # [N] int32
    count: Annotated[int, Meta(ge=1, le=MOST_ITEMS)]
    max_tokens: Annotated[int, Meta(ge=1, le=MOST_ITEMS)]
    temperature: Annotated[float, Meta(ge=0, le=1e3)] = 1.0
    top_p: Annotated[float, Meta(ge=1e-6, le=1)] = 1.0
    top_k: Number = -1
    seed: Count = 0
    stop: Several[Text] = ()
    stop_ids: Several[Count] = ()
    ignores_end: bool = False  # generate on behind an end of sequence
    prompt_logprobs: bool = False
    prompt_top: Count = 0  # most probable tokens to name at each place of the prompt
    sample_top: Count = 0  # the same of each answer


# ---- outcomes -----------------------------------------------------------------------------------


class CommandFailed(Struct, frozen=True, kw_only=True, tag=True):
    """Why a command has no result; whether its tenant or this system is the cause."""

    reason: Text
    category: Literal["user", "server"]


class Losses(Struct, frozen=True, kw_only=True, tag=True):
    """Outcome of ``Forward``. Log-probabilities of the targets [N, K] float32, by datum."""

    logprobs: Several[Blob]
    widths: Several[Count]  # K by datum
    metrics: ByName[Figure]


class Stepped(Struct, frozen=True, kw_only=True, tag=True):
    """Outcome of ``OptimStep``."""

    metrics: ByName[Figure]


class Made(Struct, frozen=True, kw_only=True, tag=True):
    """Outcome of ``CreateModel`` and ``LoadWeights``."""


class Saved(Struct, frozen=True, kw_only=True, tag=True):
    """Outcome of ``SaveWeights``: a file or folder in the server's folder, by its digest."""

    digest: Name
    num_bytes: Count


class Top(Struct, frozen=True, kw_only=True):
    """The k most probable tokens at each of n places: ids int32 and logprobs float32, [n, k]."""

    k: Count
    ids: Blob
    logprobs: Blob


class SampledAnswer(Struct, frozen=True, kw_only=True):
    """One answer: ids int32 and logprobs float32, [N]."""

    tokens: Blob
    logprobs: Blob
    finish: Literal["stop", "length"]
    top: Top | None = None


class Sampled(Struct, frozen=True, kw_only=True, tag=True):
    """Outcome of ``Sample``."""

    version: Name  # version of the adapters that chose every token
    answers: Several[SampledAnswer]
    prompt_logprobs: Blob | None = None  # [N] float32, NaN where a token has no logprob
    prompt_top: Top | None = None
    cached_tokens: Count = 0


Outcome: TypeAlias = CommandFailed | Losses | Stepped | Made | Saved | Sampled


# ---- messages between a command server and its workers ------------------------------------------


class TakeCommand(Struct, frozen=True, kw_only=True, tag=True):
    """A learner asks for the next command; ``at`` is the last one each model has carried out."""

    at: ByName[Number]
    life: Name  # another one after each start of the learner
    wait_s: Seconds


class ReportCommand(Struct, frozen=True, kw_only=True, tag=True):
    """Outcome of a command of a model, attached. May be repeated: the first one counts."""

    model: Name
    number: Count
    applied: Number  # last command that the model's durable state holds


class TakeSamples(Struct, frozen=True, kw_only=True, tag=True):
    """A generator asks for more samples than those that it holds; also its sign of life."""

    name: Name
    held: Several[Name]
    room: Count
    wait_s: Seconds


class ReportSample(Struct, frozen=True, kw_only=True, tag=True):
    """Outcome of a sample, attached."""

    request: Name


class FetchVersion(Struct, frozen=True, kw_only=True, tag=True):
    """A generator asks for the files of a version of adapters."""

    version: Name


WorkerRequest: TypeAlias = TakeCommand | ReportCommand | TakeSamples | ReportSample | FetchVersion


class Handed(Struct, frozen=True, kw_only=True, tag=True):
    """A command for a learner, which is attached unless it has ``passed``.

    It is ``new``; or computed ``again`` for its gradient alone, its outcome being known; or it has
    ``passed``: nothing is left to do for it.
    """

    model: Name
    number: Count
    what: Literal["new", "again", "passed"]


class HandedSamples(Struct, frozen=True, kw_only=True, tag=True):
    """Samples for a generator, which are attached, and those it holds that none waits for."""

    requests: Several[Name]
    cancelled: Several[Name] = ()


class Nothing(Struct, frozen=True, kw_only=True, tag=True):
    """Nothing to do yet. ``models`` are all there are: a learner forgets others."""

    models: Several[Name] = ()


class Noted(Struct, frozen=True, kw_only=True, tag=True):
    """A report is on disk; or here are the files of a version, attached."""


class WorkerRefused(Struct, frozen=True, kw_only=True, tag=True):
    """A request that is not answered, and why."""

    reason: Text


WorkerAnswer: TypeAlias = Handed | HandedSamples | Nothing | Noted | WorkerRefused
CommandMessage: TypeAlias = WorkerRequest | WorkerAnswer | Operation | Sample | Outcome
