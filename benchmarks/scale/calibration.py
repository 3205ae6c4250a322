"""Pure but for reading its data: published runs as scenarios, and the few numbers that fit them.

A row is one run: a model on GPUs, its batch and lengths, and the seconds of its step. Where engines
and learner share the GPUs (``generate_gpus`` is 0) they take turns, with S = 0, every engine on
all GPUs and the learner on all; else each has its own. Rows with ``role = "fit"`` find a system's
parameters, the others are predicted with them:

    layer_s        seconds of a layer in a decode step beside reading and multiplying
    eager_s        the same where the engine has no graphs of its kernels
    message_s      seconds of a layer for its messages, where an engine has several GPUs
    network_s      the same where it spans hosts
    share          of bandwidth and peak that an engine reaches; share/... of a kind of GPU
    switch_s       seconds of a step for taking turns: weights in and out, caches, refit
    refit_s        the same for each GB of weights
    update_s       seconds of one optimizer step, however many GPUs
    mean           of the responses' lengths, where it is not published
    sequences      of one engine at most
    spread         of lengths: their standard deviation over their mean
    link           of a NIC's rate that tokens on their way to experts reach
    gain           of a learner with GPUs of its own, over the MFU of one that shares them
    mfu/...        of a learner, per software, kind of GPU and model; solved, not searched for
"""

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from statistics import fmean
from typing import Literal

import msgspec

from slipstream.deploy.predict.laws.engine_law import EngineLaw
from slipstream.deploy.predict.laws.gpus import Cluster, Gpu, gpu_named
from slipstream.deploy.predict.laws.learner_law import LearnerLaw, PublishLaw
from slipstream.deploy.predict.laws.shapes import shape_folder, shipped_names
from slipstream.deploy.predict.simulate.lengths import LogNormal
from slipstream.deploy.predict.simulate.scenario import Scenario
from slipstream.deploy.predict.simulate.world import simulate
from slipstream.wire.models.hf_config import HfConfig, load_hf_config

_GPUS_PER_NODE = {"GB200": 4}
_GPUS_PER_DOMAIN = {"GB200": 72}  # that NVLink connects
_GPUS = 8  # of others' nodes, which are their domains
_NIC_BYTES_S = 50e9  # of each GPU
_MEASURED = 8  # publishes: batches that were begun together end together, every second one
_MEASURED_BY_TURNS = 3  # every step is like the last
_FIRST_STEP, _LAST_STEP = 0.5, 0.05  # of a search, of logarithms
_FEWEST_ANSWERS = 256  # of a step of a part of a run
_ELEMENT = 2  # bytes of an activation
_BEST_MFU = 0.5  # no learner reaches more of the peak
Parameters = Mapping[str, float]


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One published run; 0 and None are what is not published or does not apply."""

    name: str
    role: Literal["fit", "predict"]
    gpu: str
    gpus: int
    model: str
    prompts: int  # of what is trained between two publishes
    samples: int  # of a prompt
    longest_total: int  # tokens, prompt included
    engine_ranks: int
    step_s: float = 0.0
    less: str = ""  # step_s is by how much it is longer than this row's
    mfu: str = ""  # the parameter, where rows of several models share one
    sheet: tuple[float, float, float] | None = None  # GB, TB/s, TFLOP/s of another maker's
    version: str = ""  # of the software
    generate_gpus: int = 0  # 0: all are shared
    mean_total: float | None = None  # tokens, prompt included; None: the parameter ``mean``
    staleness: float = 0.0  # publishes
    pieces: int = 1  # learner steps between two publishes
    train_ranks: int = 1  # tensor x context
    expert_ranks: int = 1
    stages: int = 1
    generate_s: float | None = None  # of it; of an asynchronous run what the learner waits
    train_s: float | None = None  # of it, with logprobs
    passes: float | None = None
    publish_s: float = 0.0  # for which the learner stands still
    pause_s: float = 0.0  # for which engines stand still
    fixed_s: float = 0.0  # published beside phases: reshard, reward, checkpoints
    loses_to: str = ""  # the row of the synchronous run, which is faster
    memory_share: float = 0.85
    is_eager: bool = False
    update_samples: int = 0  # of an optimizer step; 0: the system's
    part_of_gpus: int = 0  # of the run that this is a part of

    @property
    def is_shared(self) -> bool:
        """Whether engines and learner take turns on the same GPUs."""
        return not self.generate_gpus

    @property
    def mfu_key(self) -> str:
        """The parameter that is its learner's MFU."""
        if self.mfu:
            return self.mfu
        return "/".join(part for part in ("mfu", self.version, self.gpu, self.model) if part)


class System(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Runs of one software, with what was found to fit them."""

    name: str
    sources: list[str]
    unknown: list[str]
    rows: list[Row]
    prompt_tokens: int
    passes: float
    update_samples: int
    trials: int = 60  # of the search
    assumed: dict[str, float] = msgspec.field(default_factory=dict)
    searched: dict[str, tuple[float, float]] = msgspec.field(default_factory=dict)  # bounds
    fitted: dict[str, float] = msgspec.field(default_factory=dict)

    @property
    def parameters(self) -> dict[str, float]:
        """What rows are predicted with."""
        return {**DEFAULTS, **self.assumed, **self.fitted}


DEFAULTS: Parameters = {
    "layer_s": 1e-4,
    "eager_s": 1e-3,
    "message_s": 3e-5,  # as deploy/predict/laws/engine_law.py has it
    "network_s": 7e-5,
    "link": 1.0,
    "share": 0.6,
    "switch_s": 0.0,
    "refit_s": 0.0,
    "update_s": 0.0,
    "gain": 1.0,
    "spread": 0.6,
    "sequences": 1024,
}


@dataclass(frozen=True, slots=True)
class Predicted:
    """What the simulation says of a row."""

    row: Row
    step_s: float
    generate_s: float  # that the learner waits
    train_s: float
    num_tokens: float  # that it trains

    @property
    def error(self) -> float:
        """Predicted over published, less one; 0 where nothing is published."""
        return self.step_s / self.row.step_s - 1.0 if self.row.step_s else 0.0


@cache
def systems() -> dict[str, System]:
    """Return the published systems by the names of their files."""
    folder = files("benchmarks.scale.published")
    found = sorted(item.name for item in folder.iterdir() if item.name.endswith(".toml"))
    return {
        name.removesuffix(".toml"): msgspec.toml.decode(
            (folder / name).read_bytes(), type=System, strict=False
        )
        for name in found
    }


@cache
def shape(model: str) -> HfConfig:
    """Return the architecture of a published model."""
    if model in shipped_names():
        return load_hf_config(shape_folder(model))
    folder = files("benchmarks.scale.published") / "models" / model
    return load_hf_config(Path(str(folder)))


def scenario_of(
    system: System, row: Row, parameters: Parameters, *, measured: int | None = None
) -> Scenario:
    """Return the run of a row; ``measured`` publishes of it count, after the first ones."""
    measured = measured or measured_of(row)
    hf, gpu = shape(row.model), _gpu(row)
    mean = row.mean_total or parameters["mean"] + system.prompt_tokens
    per_update = row.update_samples or system.update_samples
    all_samples = row.prompts * row.samples
    updates = max(1.0, all_samples / per_update)
    generating = row.generate_gpus or row.gpus
    training = row.gpus - row.generate_gpus
    replicas = max(1.0, training / (row.train_ranks * row.stages))
    microbatches = max(1.0, all_samples / updates * mean / row.longest_total / replicas)
    bubble = 1.0 + (row.stages - 1) / microbatches
    mfu = parameters[row.mfu_key]
    if not row.is_shared:
        mfu = min(_BEST_MFU, mfu * parameters["gain"])
    pieces = row.pieces
    fixed = row.fixed_s + updates * parameters["update_s"]
    if row.is_shared:
        fixed += parameters["switch_s"] + parameters["refit_s"] * 2 * hf.num_parameters / 1e9
    bound = pieces - 1 + round(pieces * row.staleness)
    share = parameters.get(f"share/{row.gpu}", parameters["share"])
    engine = EngineLaw.of(
        hf,
        gpu,
        num_gpus=row.engine_ranks,
        base_s=hf.num_hidden_layers * _layer_s(row, parameters),
        share=share,
        memory_share=row.memory_share,
    )
    engines = max(1, generating // row.engine_ranks)
    learner = LearnerLaw.of(
        hf,
        gpu,
        num_gpus=training,
        mfu=mfu / bubble,
        step_s=(fixed + row.publish_s) / pieces,
        passes=row.passes or system.passes,
    )
    learner = replace(learner, token_s=learner.token_s + _exchange_s(system, row, parameters))
    warm = 1 + math.ceil(row.staleness)
    return Scenario(
        steps=(warm + measured) * pieces,
        groups_per_step=max(1, round(row.prompts / pieces)),
        group_size=row.samples,
        max_staleness_steps=bound,
        publish_every=pieces,
        engines=1,
        max_sequences=int(parameters["sequences"]) * engines,
        engine=balanced(engine, engines),
        learner=learner,
        publish=PublishLaw(pause_s=row.pause_s),
        lengths=LogNormal(
            mean=min(mean, 0.97 * row.longest_total) - system.prompt_tokens,
            spread=parameters["spread"],
            longest=row.longest_total - system.prompt_tokens,
        ),
        prompt_tokens=system.prompt_tokens,
    )


def balanced(law: EngineLaw, engines: int) -> EngineLaw:
    """Return the law of several engines among which all work is spread evenly, as one engine."""
    return replace(
        law,
        expert_share=1 - (1 - law.expert_share) ** (1 / engines),
        sequence_s=law.sequence_s / engines,
        context_s=law.context_s / engines,
        prefill_s=law.prefill_s / engines,
        max_cached_tokens=law.max_cached_tokens * engines,
    )


def measured_of(row: Row) -> int:
    """Return how many publishes of a row's run count."""
    return _MEASURED if row.staleness or row.pieces > 1 else _MEASURED_BY_TURNS


def _gpu(row: Row) -> Gpu:
    if row.sheet is None:
        return gpu_named(row.gpu)
    memory, bandwidth, flops = row.sheet
    return Gpu(
        name=row.gpu,
        memory_gib=memory * 1e9 / 2**30,
        hbm_bytes_s=bandwidth * 1e12,
        nvlink_bytes_s=math.inf,
        peak_flops=flops * 1e12,
    )


def _layer_s(row: Row, parameters: Parameters) -> float:
    """Return the seconds of a layer beside reading and multiplying."""
    seconds = parameters["eager_s" if row.is_eager else "layer_s"]
    if row.engine_ranks > 1:
        seconds += parameters["message_s"]
    if row.engine_ranks > _neighbors(row):
        seconds += parameters["network_s"]
    return seconds


def _neighbors(row: Row) -> int:
    """Return the GPUs of a group that NVLink surely connects.

    Nodes of a run that one domain does not hold were put into groups whichever domain they were in
    (NVIDIA-NeMo/RL, pull requests 2612 and 2986).
    """
    domain = _GPUS_PER_DOMAIN.get(row.gpu, _GPUS)
    return (
        domain if (row.part_of_gpus or row.gpus) <= domain else _GPUS_PER_NODE.get(row.gpu, _GPUS)
    )


def _exchange_s(system: System, row: Row, parameters: Parameters) -> float:
    """Return the seconds of one token's way to its experts and back, on the learner's GPUs.

    Forward, backward, and forward alone, as deploy/predict/laws/learner_step.py has it.
    """
    hf, group = shape(row.model), row.expert_ranks
    if group == 1:
        return 0.0
    passes = 2 + 3 * ((row.passes or system.passes) - 1)
    sent = 2 * passes * _ELEMENT * hf.hidden_size * hf.experts_per_token
    sent *= hf.num_sparse_layers * (group - 1) / group
    cluster = Cluster(
        gpu=_gpu(row),
        gpus_per_host=_neighbors(row),
        nics=_neighbors(row),
        nic_bytes_s=parameters["link"] * _NIC_BYTES_S,
    )
    return cluster.exchange_s(sent / (row.gpus - row.generate_gpus), group)


def predict(
    system: System, row: Row, parameters: Parameters, *, measured: int | None = None
) -> Predicted:
    """Return what a row's run does, once it is under way."""
    measured = measured or measured_of(row)
    scenario = scenario_of(system, row, parameters, measured=measured)
    steps = simulate(scenario).steps
    skip = scenario.steps - measured * row.pieces
    counted = steps[skip:]
    seconds = (steps[-1].committed_s - steps[skip - 1].committed_s) / measured
    if row.less:
        other = next(one for one in system.rows if one.name == row.less)
        seconds -= predict(system, other, parameters).step_s
    return Predicted(
        row=row,
        step_s=seconds,
        generate_s=sum(one.waited_s for one in counted) / measured,
        train_s=sum(one.trained_s for one in counted) / measured,
        num_tokens=sum(one.num_tokens for one in counted) / measured,
    )


# ---- the fit ---------------------------------------------------------------------


def fit(system: System, report: Callable[[str], None] = lambda _line: None) -> dict[str, float]:
    """Return the parameters that fit the system's rows of that role.

    Those of ``searched`` by a random walk from the middle of their bounds, whose steps become
    smaller, and which is the same each time; MFUs are solved for each set of them. Errors are of
    logarithms, squared: of steps, and of generation (asynchronously: what the learner waits) where
    it is published.
    Searched with are runs of a part of the engines with a part of the batch, which take as long but
    for the longest answer; the last MFUs are of whole runs.
    """
    part = msgspec.structs.replace(system, rows=[part_of(system, row) for row in system.rows])
    rng = random.Random(0)  # noqa: S311 no secret
    best = {name: math.sqrt(low * high) for name, (low, high) in system.searched.items()}
    loss = solved(part, best)[1]
    for trial in range(system.trials if best else 0):
        reach = max(_LAST_STEP, _FIRST_STEP * (1 - trial / system.trials))
        moved = dict(best)
        for name in rng.sample(sorted(best), rng.randint(1, len(best))):
            low, high = system.searched[name]
            moved[name] = min(high, max(low, best[name] * math.exp(rng.gauss(0.0, reach))))
        if (found := solved(part, moved)[1]) < loss:
            best, loss = moved, found
            report(f"{system.name}, trial {trial}: {loss:.5f}")
    return {**best, **solved(system, best)[0]}


def solved(system: System, searched: Parameters) -> tuple[dict[str, float], float]:
    """Return MFUs with which fitted rows take as long as published, in the mean; and the loss.

    Of a synchronous row what is not generation is the learner's, in proportion to 1 / MFU.
    """
    base = {**DEFAULTS, **system.assumed, **searched}
    rows = [row for row in system.rows if row.role == "fit"]
    turns: list[tuple[Row, float, float, float]] = []  # generation, fixed, of the learner by MFU
    logs: dict[str, list[float]] = {}
    for row in rows:
        if row.staleness or row.pieces > 1:
            continue
        probe = {**base, row.mfu_key: 1.0}
        told = predict(system, row, probe, measured=2)
        fixed = scenario_of(system, row, probe).learner.step_s
        fixed += told.num_tokens * _exchange_s(system, row, base)
        of_mfu = told.train_s - fixed
        turns.append((row, told.generate_s, fixed, of_mfu))
        if not row.step_s:
            logs.setdefault(row.mfu_key, []).append(math.log(base[row.mfu_key]))
            continue
        rest = (row.train_s or row.step_s - told.generate_s) - fixed
        logs.setdefault(row.mfu_key, []).append(
            math.log(min(_BEST_MFU, of_mfu / max(rest, 0.02 * row.step_s)))
        )
    mfus = {name: math.exp(fmean(values)) for name, values in logs.items()}
    mfus |= {name: value for name, value in base.items() if name in mfus}
    squares = []
    for row, generate_s, fixed, of_mfu in turns:
        step_s = generate_s + fixed + of_mfu / mfus[row.mfu_key]
        if row.step_s:
            squares.append(math.log(step_s / row.step_s) ** 2)
        if row.generate_s:
            squares.append(math.log(generate_s / row.generate_s) ** 2)
    for row in rows:
        if row.staleness or row.pieces > 1:
            told = predict(system, row, {**base, **mfus})
            squares.append(math.log(told.step_s / row.step_s) ** 2)
            if row.generate_s:
                waited = max(told.generate_s, 0.01 * told.step_s)
                squares.append(math.log(waited / row.generate_s) ** 2)
    return mfus, fmean(squares) if squares else 0.0


def part_of(system: System, row: Row) -> Row:
    """Return a row with 1/2 or 1/4 of its GPUs and prompts, where at least 256 answers are left."""
    found = row
    for parts in (2, 4):
        engines = (row.generate_gpus or row.gpus) // row.engine_ranks
        replicas = (row.gpus - row.generate_gpus) // (row.train_ranks * row.stages)
        updates = row.update_samples or system.update_samples
        if any(count % parts for count in (row.prompts, engines, replicas, updates)):
            break
        if row.prompts * row.samples // parts < _FEWEST_ANSWERS:
            break
        found = msgspec.structs.replace(
            row,
            part_of_gpus=row.gpus,
            gpus=row.gpus // parts,
            generate_gpus=row.generate_gpus // parts,
            prompts=row.prompts // parts,
            update_samples=updates // parts,
        )
    return found
