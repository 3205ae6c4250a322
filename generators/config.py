"""Settings of the generators."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from slipstream.broker.config import DataSection, RewardSection, private_paths
from slipstream.generators.engine import ExpertLayers
from slipstream.weightbus.config import WeightBusSection, weightbus_section
from slipstream.weightbus.transports import AUTO, FALLBACK, TRANSPORTS, chosen
from slipstream.wire.errors import ConfigError
from slipstream.wire.gpus import usable_gpus
from slipstream.wire.models.families.registry import FAMILIES
from slipstream.wire.models.families.tables import Family
from slipstream.wire.models.fp8 import quantization_trouble
from slipstream.wire.models.hf_config import family_of, load_hf_config, text_keys
from slipstream.wire.settings.load import Section, Table, section
from slipstream.wire.settings.lora import LoraSection, lora_section, refuse_unshared
from slipstream.wire.settings.rendezvous import parse_rendezvous
from slipstream.wire.settings.sections import (
    AtLeast0,
    AtLeast1,
    EnvironmentSection,
    EvalSection,
    Positive,
    RunSection,
    SamplingSection,
    model_folder,
    run_section,
)
from slipstream.wire.settings.serve import serve_section, serves
from slipstream.wire.settings.tenants import Tenant, tenants_of

Device = Literal["cpu", "cuda"]


_OURS = (
    *("model_path", "host", "port", "api_key", "device", "dtype", "max_running_requests"),
    *("sampling_mask_max_tokens", "enable_return_routed_experts"),
    "disable_shared_experts_fusion",
    *("nnodes", "node_rank", "dist_init_addr"),
    *("enable_lora", "lora_paths", "max_lora_rank", "lora_target_modules"),
    *("max_loras_per_batch", "max_loaded_loras", "enable_lora_overlap_loading"),
)
MOE_RUNNER = "triton"  # kernels of experts; they read them as they were published
_MOVED = "the check of an engine's weights knows where experts are while none is moved or copied"
# Settings refused for an engine of several ranks, with reasons.
_ONE = {
    "pp_size": "SGLang counts ranks of a weight group by tensor parallelism alone, and the stages "
    "would take each other's place",
    "dp_size": "SGLang receives weights in one replica only; generators.count has more of them",
    **dict.fromkeys(
        ("attn_cp_size", "dwdp_size", "moe_dp_size"),
        "the check of an engine's weights knows no such split of its tensors",
    ),
}
# Settings that must keep SGLang's value, with reasons.
_KEPT = {
    "disaggregation_mode": (
        "null",
        "an engine that only prefills keeps keys and values of the old weights when weights change",
    ),
    "moe_runner_backend": (
        MOE_RUNNER,
        "others lay experts out in ways that the check of an engine's weights does not know",
    ),
    **dict.fromkeys(
        ("moe_a2a_backend", "elastic_ep_backend"),
        ("none", "ranks would have other parts of the model than the check of its weights knows"),
    ),
    "init_expert_location": ("trivial", _MOVED),
    "ep_num_redundant_experts": (0, _MOVED),
    "enable_eplb": (False, _MOVED),
}
# Settings refused for any engine, with reasons.
_REFUSED = {
    "quantization": "an engine must hold the published weights bit by bit; weightbus.precision has "
    "them published in fp8",
    "enforce_shared_experts_fusion": "the check of an engine's weights and routing replay know "
    "shared experts by themselves alone",
    "moe_dense_tp_size": "the check of an engine's weights knows dense layers that all ranks share",
    **dict.fromkeys(
        ("ep_dispatch_algorithm", "kt_num_gpu_experts"),
        "tokens would go to other experts than their router chose",
    ),
    "speculative_algorithm": "which version chose a token is unknown where a draft proposed it",
}
# Flags that are on here, and may be off.
_SWITCHED_ON = (
    "enable_fp32_lm_head",
    "disable_overlap_schedule",
    "enable_mixed_chunk",
    "enable_session_radix_cache",
)
_CACHE = "kv_cache_dtype"
_FP8_KERNELS = "fp8_gemm_runner_backend"
_DENSE_LAYERS = "first_k_dense_replace"  # number of first layers without experts, in config.json
_FEWEST_KEPT = 2  # tokens that sampling.top_k must keep
_MAX_GENERATORS = 10_000  # served by one relay
_MAX_STOPS = 32  # SGLang's limit


class GeneratorsSection(Section, frozen=True, kw_only=True):
    """[generators]: the inference engines and their agents.

    Names in `generators.sglang` are checked by the engine's server when it starts; an unknown one
    ends the run. They win over the flags that Slipstream sets itself. One of these is
    `enable_fp32_lm_head`, logits in float32 as the learner computes them: in bfloat16 a logprob is
    off by 0.02 nats on average. Set it to `false` for the engine's own type. Others, with
    `weightbus.in_flight = "retract"`, are `disable_overlap_schedule`, `false` on a GPU, and with
    environments `enable_mixed_chunk` and `enable_session_radix_cache`.
    """

    count: AtLeast0 = 2
    """Generators that `slipstream run` starts; 0 if all are on other hosts."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the engine runs; auto takes a GPU if there is one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the engine's weights; auto is float32 on a CPU, bfloat16 on a GPU."""
    max_sequences: AtLeast1 = 64
    """Trajectories that one engine generates at a time, at most."""
    concurrency: Literal["adaptive", "fixed"] = "adaptive"
    """Number of `max_sequences` under way: adaptive follows the capacity of the engine's KV cache
    and takes fewer before answers are evicted from it; fixed is always all."""
    siblings_together: bool = False
    """Send the siblings of a group to the engine in one request: half the CPU time for short
    answers, but siblings arrive when the longest is finished."""
    max_cached_tokens: AtLeast1 = 16384
    """Size of the engine's KV cache on a CPU, in tokens."""
    shadow: bool = True
    """Keep a second copy of the weights on the engine's device where the cache keeps three quarters
    of its room: a version is loaded there while the engine generates, which then stands still for a
    copy only. false leaves that memory to the cache."""
    start_timeout_s: Positive = 180.0
    """A starting engine that is idle (no CPU, no log) this long has failed; so has one that does
    not answer after twenty times this."""
    request_timeout_s: Positive = 3600.0
    """A generation that takes longer has failed; its lease is handed back."""
    environment: tuple[str, ...] = ()
    """Variables for the engine besides the system's, Python's, CUDA's, NCCL's and SGLang's."""
    sglang: dict[str, str | int | float | bool] = msgspec.field(default_factory=dict)
    """Passed on to SGLang: names of its settings with underscores, as in max_prefill_tokens. With
    tp_size an engine is split over that many GPUs, in attn_dp_size groups, each with the whole
    attention and a cache of its own (Qwen3, and mixtures but Mixtral), and in ep_size groups, each
    with as many of a mixture's experts."""
    nodes: AtLeast1 = 1
    """Hosts that the GPUs of one engine are on, generators.sglang.tp_size / generators.nodes on
    each; several are started by hand, with `start-generator --follow N --rendezvous HOST:PORT`:
    [clusters.md](clusters.md)."""
    rendezvous_timeout_s: Positive = 900.0
    """Hosts of one engine wait this long for each other at the start."""
    node_silence_s: Positive = 30.0
    """A host of an engine that gives no sign of life for this long is gone, and ends the engine."""

    @property
    def num_ranks(self) -> int:
        """Processes that the tensors of one engine are split over."""
        return int(self.sglang.get("tp_size", 1))

    @property
    def ranks_per_node(self) -> int:
        """Number of these processes on each host."""
        return self.num_ranks // self.nodes

    @property
    def cache_bytes(self) -> int:
        """Bytes of a key's or value's number in the cache of an engine on a GPU."""
        return 1 if str(self.sglang.get(_CACHE, "")).startswith("fp8") else 2

    @property
    def attention_groups(self) -> int:
        """Number of groups of these processes that each hold the whole attention."""
        return int(self.sglang.get("attn_dp_size", 1))

    @property
    def expert_groups(self) -> int:
        """Number of groups of these processes that each hold as many of the experts."""
        return int(self.sglang.get("ep_size", 1))


class GeneratorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """All that one generator reads."""

    run: RunSection
    data: DataSection
    sampling: SamplingSection
    eval: EvalSection
    generators: GeneratorsSection
    weightbus: WeightBusSection
    reward: RewardSection
    hidden: tuple[Path, ...]  # paths that a reward function must not see
    lora: LoraSection = LoraSection()
    environment: EnvironmentSection = EnvironmentSection()
    tenants: tuple[Tenant["GeneratorSettings"], ...] = ()  # runs that share the engine
    served_adapters: int = 0  # serve.adapters, of a command server's generator

    @property
    def model(self) -> Path:
        """Folder of the policy to start from."""
        return model_folder(self.run, with_weights=True)

    @property
    def device(self) -> Device:
        """Device of the engine."""
        if self.generators.device != "auto":
            return self.generators.device
        return "cuda" if usable_gpus() else "cpu"

    @property
    def keeps_shadow(self) -> bool:
        """True if versions are loaded next to the live weights where memory has room."""
        is_loaded = not TRANSPORTS[self.transport].writes_live
        return self.generators.shadow and is_loaded and not self.lora.is_named

    @property
    def has_experts(self) -> bool:
        """True if tokens of the policy go to experts."""
        family = FAMILIES.get(str(_model_config(self.model).get("model_type")))
        return family is not None and family.has_experts

    @property
    def has_windows(self) -> bool:
        """True if some layers of the policy attend to a window alone."""
        family = FAMILIES.get(str(_model_config(self.model).get("model_type")))
        return family is not None and any(kind.has_window for kind in family.kinds.values())

    @property
    def num_probe_sequences(self) -> int:
        """Sequences that the engine computes in addition to its answers."""
        if not self.weightbus.probe_every:
            return 0
        return self.weightbus.probe_sequences * max(1, len(self.tenants))

    @property
    def transport(self) -> str:
        """Transport of the engine's weights."""
        return chosen(self.weightbus.transport)

    @property
    def uses_deltas(self) -> bool:
        """True if changes since the last version are fetched instead of whole versions."""
        encoding = self.weightbus.encoding
        return encoding == "delta" or (encoding == AUTO and bool(self.run.broker))

    @property
    def num_kept_adapters(self) -> int:
        """Number of newest adapter versions that an engine keeps, even without uses."""
        if self.tenants:
            return sum(tenant.settings.num_kept_adapters for tenant in self.tenants)
        return self.served_adapters or self.run.staleness_bound + 1

    @property
    def skips_bad_prompts(self) -> bool:
        """True if a row that is no prompt is skipped instead of ending the run."""
        return self.data.on_bad_row == "skip"

    @property
    def longest_tokens(self) -> int:
        """Most tokens of a prompt and its response."""
        if self.environment.is_named:
            return self.environment.longest(self.sampling)
        responses = self.sampling.max_response_tokens, self.eval.max_response_tokens
        return self.sampling.max_prompt_tokens + max(responses)

    @property
    def keeps_sessions(self) -> bool:
        """True if the cache keeps the prefixes of live trajectories of several turns."""
        flags = self.generators.sglang
        return (
            self.environment.is_named
            and self.weightbus.in_flight == "retract"
            and not flags.get("disable_radix_cache", False)
            and bool(flags.get("enable_session_radix_cache", True))
        )

    @property
    def most_outside(self) -> int:
        """Most trajectories beyond the engine's lanes while as many are outside of the engine."""
        return self.environment.max_outside if self.environment.is_named else 0

    @property
    def has_no_scorer(self) -> bool:
        """True if no reward function scores trajectories without a reward of their environment."""
        return self.environment.is_named and not self.reward.workers and not self.reward.inline

    @property
    def expert_layers(self) -> ExpertLayers | None:
        """Layers whose experts are recorded for the learner; None if none are."""
        if self.run.routing_replay != "R3":
            return None
        config = _model_config(self.model)
        total, dense = (config.get(name, 0) for name in ("num_hidden_layers", _DENSE_LAYERS))
        return ExpertLayers(int(str(total)), int(str(dense)))

    @property
    def dtype(self) -> str:
        """Type of the engine's weights."""
        if self.generators.dtype != "auto":
            return self.generators.dtype
        return "float32" if self.device == "cpu" else "bfloat16"


def generator_settings(table: Table) -> GeneratorSettings:
    """Decode and check the generators' sections; for a pool, also those of its tenants."""
    return _for_tenants(_run_settings(table), tenants_of(table, _tenant_settings))


def _tenant_settings(table: Table) -> GeneratorSettings:
    refuse_unshared(table)
    return _run_settings(table)


def _for_tenants(
    pool: GeneratorSettings, tenants: tuple[Tenant[GeneratorSettings], ...]
) -> GeneratorSettings:
    """Return the settings of an engine that has room for what every tenant needs."""
    if not tenants:
        return pool
    runs = [tenant.settings for tenant in tenants]
    targets = {target for run in runs for target in run.lora.targets}
    replace = msgspec.structs.replace
    recording = [run.sampling for run in runs if run.sampling.records_kept]
    widest = max(runs, key=lambda run: run.lora.rank or 0).lora
    acting = [run.environment for run in runs if run.environment.is_named]
    return replace(
        pool,
        tenants=tenants,
        lora=replace(widest, targets=tuple(sorted(targets))),
        sampling=max(recording, key=lambda own: own.max_kept_tokens, default=pool.sampling),
        environment=acting[0] if acting else pool.environment,
    )


def _run_settings(table: Table) -> GeneratorSettings:
    settings = GeneratorSettings(
        run=run_section(table),
        data=section(table, "data", DataSection),
        sampling=section(table, "sampling", SamplingSection),
        eval=section(table, "eval", EvalSection),
        generators=section(table, "generators", GeneratorsSection),
        weightbus=weightbus_section(table),
        reward=section(table, "reward", RewardSection),
        hidden=private_paths(table),
        lora=lora_section(table),
        environment=section(table, "environment", EnvironmentSection),
        served_adapters=serve_section(table)[0].adapters if serves(table) else 0,
    )
    folder = model_folder(settings.run)
    _check_sampling(settings.sampling)
    evaluation = settings.eval
    if evaluation.samples > 1 and evaluation.temperature == 0:
        raise ConfigError(
            f"eval.samples = {evaluation.samples} greedy answers are all the same: set "
            "eval.temperature above 0"
        )
    if evaluation.top_k == 0 or evaluation.top_k < -1:
        raise ConfigError(f"eval.top_k must be -1 (all) or at least 1, got {evaluation.top_k}")
    _check_lengths(settings, folder)
    if settings.generators.max_sequences < settings.run.group_size:
        raise ConfigError(
            f"generators.max_sequences = {settings.generators.max_sequences} does not hold one "
            f"group of run.group_size = {settings.run.group_size}"
        )
    if evaluation.enabled and settings.generators.max_sequences < evaluation.samples:
        raise ConfigError(
            f"generators.max_sequences = {settings.generators.max_sequences} does not hold the "
            f"eval.samples = {evaluation.samples} answers to one problem"
        )
    if settings.generators.count > _MAX_GENERATORS:
        raise ConfigError(
            f"generators.count must be at most {_MAX_GENERATORS}, got {settings.generators.count}"
        )
    _check_flags(settings.generators.sglang, settings.weightbus.in_flight)
    config = _model_config(folder)
    _check_ranks(settings.generators.sglang, config)
    _check_precision(settings, folder)
    _check_tower(config)
    _check_nodes(settings)
    _check_replay(settings.run, config)
    _check_environment(settings)
    return settings


def _check_servers(environment: EnvironmentSection) -> None:
    """Refuse environment servers that could not be reached."""
    for text in environment.servers:
        parse_rendezvous(text, setting="environment.servers")
    if environment.servers and not Path(environment.key_file).is_file():
        raise ConfigError(
            f"environment.key_file must name the key of environment.servers, got "
            f"{environment.key_file!r}"
        )


def _check_environment(settings: GeneratorSettings) -> None:
    """Refuse settings that do not fit trajectories of several turns."""
    if not settings.environment.is_named:
        return
    _check_servers(settings.environment)
    fewest = settings.sampling.min_response_tokens
    if fewest:
        raise ConfigError(
            f"sampling.min_response_tokens must be 0 with environment.function, got {fewest}: a "
            "turn may be as short as a call of a tool"
        )
    if settings.generators.siblings_together:
        raise ConfigError(
            "generators.siblings_together must be false with environment.function: each sibling "
            "has its own turns"
        )


def _check_replay(run: RunSection, config: Mapping[str, object]) -> None:
    """Refuse to replay the routing of a model that does not route."""
    family = FAMILIES.get(str(config.get("model_type")))
    if run.routing_replay != "off" and family is not None and not family.has_experts:
        raise ConfigError(
            f'run.routing_replay = "{run.routing_replay}" needs experts to route to, and run.model '
            f"is {family.model_type}, which has none"
        )


def _check_tower(config: Mapping[str, object]) -> None:
    """Refuse a quantized model that sees: its engine would not have the folder's tower."""
    family = FAMILIES.get(str(config.get("model_type")))
    if family is not None and family.tower is not None and config.get("quantization_config"):
        raise ConfigError(
            "run.model is quantized, and an engine of such a model begins with made-up weights, "
            "its vision tower included: take the folder that is not"
        )


def _check_flags(flags: Mapping[str, object], in_flight: str) -> None:
    """Refuse settings of SGLang that Slipstream sets, or that break a run."""
    for name, value in flags.items():
        if "-" in name:
            raise ConfigError(
                f"generators.sglang.{name}: write it with underscores, {name.replace('-', '_')}"
            )
        if name in _OURS:
            raise ConfigError(f"generators.sglang.{name} follows from other settings")
        if name in _REFUSED:
            raise ConfigError(f"generators.sglang.{name} must not be set: {_REFUSED[name]}")
        if name in _ONE and value != 1:
            raise ConfigError(f"generators.sglang.{name} must be 1: {_ONE[name]}, got {value}")
        if name in _KEPT and value != _KEPT[name][0]:
            kept, why = _KEPT[name]
            raise ConfigError(
                f"generators.sglang.{name} must be {json.dumps(kept)}, got {json.dumps(value)}: "
                f"{why}"
            )
        if name == "disable_overlap_schedule" and value is False and in_flight == "in_place":
            raise ConfigError(
                "generators.sglang.disable_overlap_schedule = false needs weightbus.in_flight = "
                '"retract": a pause in place leaves a batch of the old weights unread, and version '
                "runs would be off by one token"
            )
        if value is False and name not in _SWITCHED_ON:
            raise ConfigError(
                f"generators.sglang.{name} = false: SGLang's flags can only be switched on"
            )


def _check_ranks(flags: Mapping[str, object], config: Mapping[str, object]) -> None:
    """Refuse an engine whose ranks would have unequal shares of the model."""
    num_ranks, groups, expert_groups = (
        _number(flags, name) for name in ("tp_size", "attn_dp_size", "ep_size")
    )
    for name, number in (("attn_dp_size", groups), ("ep_size", expert_groups)):
        if num_ranks % number:
            raise ConfigError(
                f"generators.sglang.tp_size must be a multiple of generators.sglang.{name}, got "
                f"{num_ranks} and {number}"
            )
    if groups > 1:
        _check_dp_attention(flags, config)
    expert_inner = _check_experts(config, expert_groups)
    split_by = "generators.sglang.tp_size" + " / attn_dp_size" * (groups > 1)
    of_experts = num_ranks // expert_groups
    shares = {
        "num_attention_heads": (num_ranks // groups, split_by),
        "num_key_value_heads": (num_ranks // groups, split_by),
        "linear_num_key_heads": (num_ranks // groups, split_by),
        "intermediate_size": (num_ranks, "generators.sglang.tp_size"),
        "shared_expert_intermediate_size": (num_ranks, "generators.sglang.tp_size"),
        expert_inner: (
            of_experts,
            "generators.sglang.tp_size" + " / ep_size" * (expert_groups > 1),
        ),
    }
    for name, (share, setting) in shares.items():
        size = config.get(name)
        if isinstance(size, int) and size % share:
            raise ConfigError(
                f"{name} of run.model must be a multiple of {setting}, got {size} and {share}"
            )


def _check_precision(settings: GeneratorSettings, folder: Path) -> None:
    """Refuse fp8 that an engine cannot have: a cache, kernels, blocks that its ranks would cut."""
    if settings.generators.cache_bytes == 1 and settings.device == "cpu":
        raise ConfigError(
            f'generators.sglang.{_CACHE} = "{settings.generators.sglang[_CACHE]}" needs a GPU, and '
            "this engine is on a CPU (generators.device)"
        )
    if not settings.weightbus.is_fp8:
        return
    generators = settings.generators
    kernels = generators.sglang.get(_FP8_KERNELS, "triton")
    if kernels != "triton":
        raise ConfigError(
            f'generators.sglang.{_FP8_KERNELS} = "{kernels}" with weightbus.precision = "fp8": '
            'expected "triton", which reads weights as they were loaded and checked'
        )
    if settings.device == "cuda" and settings.dtype == "float32":
        raise ConfigError(
            'generators.dtype = "float32" with weightbus.precision = "fp8": expected "bfloat16", '
            "the type that a GPU's kernels for fp8 give"
        )
    ranks, groups = generators.num_ranks, generators.attention_groups
    setting, expert_groups = "generators.sglang.tp_size", generators.expert_groups
    trouble = quantization_trouble(
        load_hf_config(folder),
        attention=(setting + " / attn_dp_size" * (groups > 1), ranks // groups),
        inner=(setting, ranks),
        experts=(setting + " / ep_size" * (expert_groups > 1), ranks // expert_groups),
    )
    if trouble:
        raise ConfigError(trouble)


def _check_nodes(settings: GeneratorSettings) -> None:
    """Refuse settings that do not fit an engine on several hosts."""
    generators, nodes = settings.generators, settings.generators.nodes
    if nodes == 1:
        return
    if generators.num_ranks % nodes:
        raise ConfigError(
            f"generators.sglang.tp_size = {generators.num_ranks} is not a multiple of "
            f"generators.nodes = {nodes}"
        )
    if generators.attention_groups > 1:
        raise ConfigError(
            f"generators.sglang.attn_dp_size must be 1 with generators.nodes = {nodes}, got "
            f"{generators.attention_groups}: between hosts SGLang would send pickled requests to "
            "ports that anyone may connect to"
        )
    if settings.lora.is_named:
        raise ConfigError(
            f"lora.rank with generators.nodes = {nodes}: adapters are loaded from one host alone; "
            'set lora.publish = "merged"'
        )
    if settings.transport != FALLBACK:
        raise ConfigError(
            f'weightbus.transport = "{settings.transport}" with generators.nodes = {nodes}: every '
            f'host of an engine fetches a version for itself; set "{FALLBACK}"'
        )


def _number(flags: Mapping[str, object], name: str) -> int:
    value = flags.get(name, 1)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(
            f"generators.sglang.{name} must be an integer of at least 1, got {value!r}"
        )
    return value


def _check_dp_attention(flags: Mapping[str, object], config: Mapping[str, object]) -> None:
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None or not family.has_dp_attention:
        splitting = (known for known in FAMILIES.values() if known.has_dp_attention)
        types = ", ".join(known.model_type for known in splitting)
        raise ConfigError(
            f"generators.sglang.attn_dp_size must be 1 for {config.get('model_type')}: SGLang "
            f"splits its attention over all ranks whatever this is; it does not for {types}"
        )
    if flags.get("enable_dp_lm_head"):
        raise ConfigError(
            "generators.sglang.enable_dp_lm_head must be off: the check of an engine's weights "
            "takes the output layer for split over all ranks"
        )


def _check_experts(config: Mapping[str, object], groups: int) -> str:
    """Refuse groups without as many experts; return the key of an expert's inner size."""
    family = FAMILIES.get(str(config.get("model_type")))
    if groups > 1 and family is not None and not family.has_experts:
        raise ConfigError(
            f"generators.sglang.ep_size must be 1 for {family.model_type}, which has no experts, "
            f"got {groups}"
        )
    names = {ours: theirs for theirs, ours in family.renamed.items()} if family is not None else {}
    for name in ("num_experts", names.get("num_experts", "num_experts")):
        number = config.get(name)
        if isinstance(number, int) and number % groups:
            raise ConfigError(
                f"{name} of run.model must be a multiple of generators.sglang.ep_size, got "
                f"{number} and {groups}"
            )
    return "moe_intermediate_size" if "moe_intermediate_size" in config else "intermediate_size"


def _model_config(folder: Path) -> dict[str, object]:
    """Return the language model's keys of config.json, and the family's defaults of absent ones."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except ValueError as error:
        raise ConfigError(f"{folder}/config.json is not valid JSON (run.model)") from error
    if not isinstance(config, dict):
        return {}
    family = family_of(config, FAMILIES)
    if isinstance(family, Family) and config.get("model_type") != family.model_type:
        keys = text_keys(config, family)
        config = config if isinstance(keys, str) else {**keys, "model_type": family.model_type}
    present = {name: value for name, value in config.items() if value is not None}
    return {**family.defaults, **present} if isinstance(family, Family) else present


def _check_sampling(sampling: SamplingSection) -> None:
    """Refuse settings that an engine cannot sample by, or a learner not train by."""
    if sampling.top_k != -1 and sampling.top_k < _FEWEST_KEPT:
        raise ConfigError(
            f"sampling.top_k must be -1 (all) or at least {_FEWEST_KEPT} for training, got "
            f"{sampling.top_k}: a token without an alternative has no gradient"
        )
    if sampling.records_kept and sampling.top_k > sampling.max_kept_tokens:
        raise ConfigError(
            f"sampling.top_k = {sampling.top_k} keeps more than sampling.max_kept_tokens = "
            f"{sampling.max_kept_tokens}: raise it, or lower sampling.top_k"
        )
    if sampling.min_response_tokens > sampling.max_response_tokens:
        raise ConfigError(
            f"sampling.min_response_tokens = {sampling.min_response_tokens} is more than "
            f"sampling.max_response_tokens = {sampling.max_response_tokens}"
        )
    if "" in sampling.stop or len(sampling.stop) > _MAX_STOPS:
        raise ConfigError(
            f"sampling.stop must hold at most {_MAX_STOPS} texts and none that is empty, "
            f"got {list(sampling.stop)}"
        )
    if any(token_id < 0 for token_id in sampling.stop_token_ids):
        raise ConfigError(f"sampling.stop_token_ids must be >= 0, got {sampling.stop_token_ids}")
    if sampling.chat_template and not Path(sampling.chat_template).is_file():
        raise ConfigError(f"sampling.chat_template = {sampling.chat_template} is no file")


def _check_lengths(settings: GeneratorSettings, folder: Path) -> None:
    """Refuse trajectories that are too long for the model or the cache."""
    sampling = settings.sampling
    responses = {
        "sampling.max_response_tokens": sampling.max_response_tokens,
        "eval.max_response_tokens": settings.eval.max_response_tokens,
    }
    setting = "sampling.max_prompt_tokens + " + max(responses, key=responses.__getitem__)
    if settings.environment.max_tokens:
        setting = "environment.max_tokens"
    longest = settings.longest_tokens
    what = f"one trajectory of {setting} = {longest}"
    positions = _model_config(folder).get("max_position_embeddings")
    if isinstance(positions, int) and longest > positions:
        raise ConfigError(f"run.model has {positions} positions and cannot hold {what} tokens")
    cached = settings.generators.max_cached_tokens
    if settings.device == "cpu" and cached < longest:
        raise ConfigError(f"generators.max_cached_tokens = {cached} does not hold {what}")
