"""Looks at one host: answers requests from standard input, each a line of JSON.

    python -m slipstream.deploy.preflight.check.node

It ends with its input, and writes nothing but answers to standard output.
"""

import os
import signal
import socket
import sys
import time
import tomllib
from dataclasses import dataclass

import msgspec

from slipstream.deploy.config import RunConfig, run_config
from slipstream.deploy.launch.plan import kind_of
from slipstream.deploy.predict.memory.gpu import GIB, generator_memory, learner_memory
from slipstream.deploy.predict.memory.host import copies_memory, host_memory, versions_bytes
from slipstream.deploy.predict.memory.learner_rank import MemoryPart
from slipstream.deploy.preflight.check.disk import observe_disk
from slipstream.deploy.preflight.check.facts import Fact, fail, ok
from slipstream.deploy.preflight.check.keys import observe_keys
from slipstream.deploy.preflight.check.libraries import (
    import_failure,
    installed,
    judge_flash_attn,
    judge_installed,
)
from slipstream.deploy.preflight.check.machine import (
    host_memory_now,
    judge_gpus,
    judge_memory,
    see_gpus,
    shared_memory_now,
)
from slipstream.deploy.preflight.check.model import observe_model
from slipstream.deploy.preflight.check.network import judge_nccl, nccl_variables, observe_network
from slipstream.deploy.preflight.check.options import (
    observe_engine,
    observe_environment,
    observe_megatron,
    observe_trackers,
)
from slipstream.deploy.preflight.check.requests import (
    ClockReading,
    HostAnswer,
    HostCard,
    HostFailed,
    HostRequest,
    LookAt,
    Observed,
)
from slipstream.deploy.preflight.check.store import observe_store
from slipstream.deploy.preflight.check.trial import observe_data, observe_prompt, observe_reward
from slipstream.learner.model.division import refuse_policy, with_vision
from slipstream.wire.errors import ConfigError, SlipstreamError
from slipstream.wire.gpus import usable_gpus
from slipstream.wire.models.hf_config import HfConfig, load_hf_config
from slipstream.wire.process.command_line import EXIT_INTERRUPTED
from slipstream.wire.process.extras import missing_library
from slipstream.wire.settings.sections import model_folder

_MODEL_SETTINGS = (
    "run.model, generators.count, generators.max_cached_tokens, learner.ranks, checkpoint"
)
_GPU_SETTINGS = "run.model, learner.tensor_parallel, learner.max_tokens_per_microbatch"


@dataclass(frozen=True, slots=True)
class _HostUse:
    """One host as the run uses it."""

    config: RunConfig
    roles: tuple[str, ...]
    keys_by_run: bool
    hf: HfConfig
    frozen: list[HfConfig]  # frozen policies of the learner
    has_critic: bool

    @property
    def kinds(self) -> frozenset[str]:
        """Planned roles here."""
        return frozenset(map(kind_of, self.roles))

    @property
    def on_gpu(self) -> bool:
        """True if engines and learner run on GPUs here."""
        return self.config.generators.device == "cuda"

    @property
    def learner_ranks(self) -> int:
        """Planned ranks of the learner here."""
        nodes = sum(kind_of(role) == "learner" for role in self.roles)
        return nodes * self.config.learner.layout.ranks_per_node

    @property
    def engines(self) -> int:
        """Planned engines here."""
        return sum(kind_of(role) == "generator" for role in self.roles)


def _view(request: LookAt) -> _HostUse:
    from slipstream.learner.training.algorithm import algorithm_of, frozen_policies  # torch

    config = run_config(tomllib.loads(request.settings))
    algorithm, model = algorithm_of(config.learner), model_folder(config.run)
    hf = with_vision(load_hf_config(model), config.learner.learner)
    refuse_policy(hf, config.learner)
    return _HostUse(
        config=config,
        roles=request.roles,
        keys_by_run=request.keys_by_run,
        hf=hf,
        frozen=frozen_policies(algorithm, config.learner),
        has_critic=algorithm.choice.needs_values,
    )


# ---- facts -----------------------------------------------------------------------


def _facts(view: _HostUse) -> list[Fact]:
    """Return the facts of this host, part by part."""
    config, kinds = view.config, view.kinds
    facts = observe_network(config, view.roles, in_cluster=view.keys_by_run)
    facts += observe_keys(config, view.roles, made_by_run=view.keys_by_run)
    facts += _resources(view)
    facts.append(judge_installed(installed(), kinds))
    if "learner" in kinds:
        failure = import_failure("flash_attn") if view.on_gpu else ""
        facts.append(judge_flash_attn(failure, on_gpu=view.on_gpu))
    if {"broker", "learner"} & kinds:
        facts += observe_disk(
            config,
            view.hf,
            has_checkpoints="learner" in kinds,
            on_gpu=view.on_gpu,
            has_critic=view.has_critic,
        )
    if "broker" in kinds:
        facts += observe_store(config.broker)
        facts += observe_trackers(config)
        facts += observe_data(config)
    if "learner" in kinds:
        facts += observe_megatron(config, view.hf)
    if "generator" in kinds:
        facts += observe_engine(config)
        facts += observe_environment(config)
    if any((fact.name, fact.outcome) == ("data", "fail") for fact in facts):
        return facts
    if "broker" in kinds:
        facts += observe_prompt(config)
    if "reward-worker" in kinds:
        facts += observe_reward(config)
    return facts


def _resources(view: _HostUse) -> list[Fact]:
    if not {"learner", "generator"} & view.kinds:
        return []
    config = view.config
    parts = (
        []
        if view.on_gpu
        else host_memory(
            view.hf,
            config,
            learner_ranks=view.learner_ranks,
            engines=view.engines,
            frozen=view.frozen,
            has_critic=view.has_critic,
        )
    )
    if "learner" in view.kinds:
        parts += copies_memory(
            view.hf,
            config.learner.checkpoint,
            on_gpu=view.on_gpu,
            has_critic=view.has_critic,
            lora=config.learner.lora,
        )
    facts = [judge_memory("memory", parts, *host_memory_now(), _MODEL_SETTINGS)]
    shared = shared_memory_now()
    if "learner" in view.kinds and shared is not None:
        versions = versions_bytes(view.hf, on_gpu=view.on_gpu, lora=config.learner.lora)
        part = MemoryPart("versions for the relay", versions, "3 versions")
        facts.append(judge_memory("shared memory", [part], *shared, "run.model"))
    return [*facts, *_gpus(view)]


def _gpus(view: _HostUse) -> list[Fact]:
    config, seen = view.config, see_gpus() if view.on_gpu else []
    need = view.learner_ranks + view.engines * config.generators.generators.num_ranks
    if config.deploy.share_gpus:
        need = max(view.learner_ranks, config.generators.generators.num_ranks)
    facts = judge_gpus(
        seen, len(usable_gpus()), need, wanted=view.on_gpu, nccl=installed().get("nccl", "")
    )
    if view.on_gpu:
        facts.append(judge_nccl(nccl_variables(config.learner.weightbus.host)))
    if not seen:
        return facts
    smallest = min(seen, key=lambda gpu: gpu.total_bytes)
    sized = config.with_settings("deploy", gpu_memory_gib=smallest.total_bytes / GIB)
    sizes = smallest.total_bytes, min(gpu.free_bytes for gpu in seen)
    if view.learner_ranks:
        parts = learner_memory(
            view.hf, sized.learner, frozen=view.frozen, has_critic=view.has_critic
        )
        facts.append(judge_memory("GPU memory, learner", parts, *sizes, _GPU_SETTINGS))
    if view.engines:
        weights = generator_memory(view.hf, sized)[:1]
        facts.append(
            judge_memory("GPU memory, engine", weights, *sizes, "run.model, generators.sglang")
        )
    return facts


def _observed(request: LookAt) -> Observed:
    hostname = socket.gethostname()
    libraries = judge_installed(installed(), frozenset(map(kind_of, request.roles)))
    if libraries.outcome == "fail":  # without them little else can be observed
        return Observed(hostname=hostname, facts=(libraries,))
    try:
        view = _view(request)
    except ConfigError as error:
        return Observed(hostname=hostname, facts=(fail("settings", str(error)),))
    facts = _facts(view)
    digests: dict[str, str] = {}
    if {"learner", "generator"} & view.kinds:
        of_model, digests = observe_model(view.config.learner.model, view.hf)
        facts += of_model
    card = HostCard(device=view.config.generators.device, libraries=installed(), model=digests)
    return Observed(hostname=hostname, facts=(ok("settings", "can be used"), *facts), card=card)


# ---- requests --------------------------------------------------------------------


def _answer(request: HostRequest) -> HostAnswer:
    if isinstance(request, LookAt):
        return _observed(request)
    return ClockReading(unix_s=time.time())


def main() -> int:
    """Answer requests until the input ends; SIGTERM raises SystemExit."""
    signal.signal(signal.SIGTERM, lambda _signum, _frame: sys.exit(EXIT_INTERRUPTED))
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries print, too
    for line in sys.stdin.buffer:
        try:
            answer = _answer(msgspec.json.decode(line, type=HostRequest))
        except (SlipstreamError, OSError) as error:
            answer = HostFailed(why=str(error))
        except ModuleNotFoundError as error:
            if (missing := missing_library(error)) is None:
                raise
            answer = HostFailed(why=str(missing))
        answers.write(msgspec.json.encode(answer) + b"\n")
        answers.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
