"""Start parameters of an SGLang server: settings, environment, a port, a key."""

import json
import os
import secrets
import zlib
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from slipstream.generators.config import GeneratorSettings
from slipstream.generators.sglang.device_defaults import (
    DeviceDefaults,
    Flag,
    device_defaults,
    installed_packages,
)
from slipstream.generators.sglang.log_noise import LEFT_OUT_FILE, LEFT_OUT_VARIABLE
from slipstream.generators.sglang.patches import (
    ADAPTERS_VARIABLE,
    GROUP_TIMEOUT_VARIABLE,
    RECEIVED_VARIABLE,
    SEEDS_VARIABLE,
    SHADOW_VARIABLE,
)
from slipstream.weightbus.net.interfaces import NCCL_ENVIRONMENT, interface_variables
from slipstream.wire.models.fp8 import quantization_config
from slipstream.wire.models.image_law import SEEING
from slipstream.wire.process.environment import handed_on
from slipstream.wire.process.patience import AT_MOST
from slipstream.wire.settings.rendezvous import Address

_VARIABLES_OF_ENGINES = (
    *("SGLANG_", "SGL_", "NCCL_", "GLOO_", "TORCH", "PYTORCH_", "TRITON_", "FLASHINFER_", "DG_"),
    *("CUTE_", "CUTLASS_", "TRTLLM_", "NVSHMEM_", "UCX_", "MC_", "MLX5_", "IBV_", "RDMAV_", "FI_"),
    *("ROCM_", "HIP_", "HSA_", "ROCR_", "AITER_", "RCCL_", "GPU_", "CC", "CXX", "CPATH"),
    *("LIBRARY_PATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "MAX_JOBS"),
)
# The compiled prefix tree of SGLang 0.5.23 takes an older torch's types for others, and its
# scheduler ends at the first request.
_TREE_CORE = "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"
_RUST_TREE_FROM = (2, 13)
_NCCL_FILE = "SGLANG_NCCL_SO_PATH"  # a missing file: its ranks take gloo alone
_CORES = "SGLANG_CPU_OMP_THREADS_BIND"
_INIT_METHOD = "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"
_FUSED_EXPERTS = "SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED"  # lays gate and up out anew
_CONVOLVED = "SGLANG_MAMBA_CONV_DTYPE"  # SGLang's is bfloat16, whatever weights have
_KEEP_ALIVE = "SGLANG_TIMEOUT_KEEP_ALIVE"
SERVER_KEEPS_S = 3600  # time after which a server closes an idle connection, even under a request
_TIES = 64  # room beyond the limit: a kernel keeps all tokens that are as likely as the last
HOST = "127.0.0.1"
_RENDEZVOUS = "rendezvous"


class EngineNode(NamedTuple):
    """One server's part of an engine on several hosts."""

    node: int
    nodes: int
    store: Address  # meeting point of its ranks: a store of torch, on node 0
    received: Path | None = None  # folder of the versions of this host; None: the order names it


def server_flags(
    settings: GeneratorSettings,
    *,
    port: int,
    api_key: str,
    seed_of: str,
    node: EngineNode | None = None,
    defaults: DeviceDefaults | None = None,
) -> dict[str, Flag]:
    """Return SGLang's settings: ours first, then the device's, then [generators.sglang].

    ``defaults`` are the device's; None takes those of the installed packages.
    """
    defaults = defaults or device_defaults(settings, installed_packages())
    generators = settings.generators
    flags: dict[str, Flag] = {
        "model_path": str(settings.model.resolve()),
        "host": HOST,
        "port": port,
        "api_key": api_key,
        "device": settings.device,
        "dtype": settings.dtype,
        # A probe is computed in parallel to all answers, and does not wait for one to end.
        "max_running_requests": generators.max_sequences + settings.num_probe_sequences,
        "skip_server_warmup": True,
        "enable_fp32_lm_head": True,  # logits as the learner's, which are not rounded to bfloat16
        # On a GPU SGLang would turn the shared experts of GLM-4.5 and DeepSeek-V3 into one more
        # routed expert, which neither the check of its weights nor routing replay knows.
        "disable_shared_experts_fusion": True,
        "random_seed": hash_seed(f"{settings.run.seed}/{seed_of}"),
        "log_level": "warning",
    }
    if settings.weightbus.in_flight == "in_place":
        flags["disable_radix_cache"] = True  # its prefixes cannot be forgotten amid responses
    if settings.keeps_sessions:
        flags["enable_session_radix_cache"] = True  # keeps its tree in Python, not in Rust
    if settings.run.routing_replay == "R3":
        flags["enable_return_routed_experts"] = True
    if settings.sampling.records_kept:
        flags["sampling_mask_max_tokens"] = settings.sampling.max_kept_tokens + _TIES
    if settings.sampling.seed_per_sibling:
        flags["sampling_backend"] = "pytorch"  # the one that takes seeds
    flags |= defaults.flags
    if settings.lora.is_named:
        flags |= _adapter_flags(settings)
    if node is not None:
        flags |= {"nnodes": node.nodes, "node_rank": node.node, "dist_init_addr": str(node.store)}
        # Hosts read the model at different speeds, and the first one waits for the others.
        flags["dist_timeout"] = int(AT_MOST * generators.start_timeout_s)
    return flags | generators.sglang


def described(settings: GeneratorSettings, name: str) -> list[str]:
    """Return a line for each setting of a generator's server, and for what follows its start."""
    defaults = device_defaults(settings, installed_packages())
    flags = server_flags(settings, port=0, api_key="(random)", seed_of=name, defaults=defaults)
    return [
        *(f"sglang {flag} = {value}" for flag, value in flags.items()),
        f"sglang /freeze_gc = {defaults.freezes_collectors}",
    ]


def model_flags(model: Path, scratch: Path, *, is_fp8: bool = False) -> dict[str, Flag]:
    """Return what names the model of an engine that must not read the run's folder as it is.

    The learner dequantizes the weights that it loads, and publishes them as settings say, whatever
    the model's folder has. An engine of another quantization begins with dummy weights: it answers
    nothing before its first version. Of a model that also sees, an engine has the language model
    alone, as the learner has.

    Args:
        model: Folder of the model.
        scratch: Private folder of the server, for a folder with another config.json.
        is_fp8: True if weights are published in fp8.
    """
    try:
        config = json.loads((model / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}  # SGLang reports the error
    if not isinstance(config, dict):
        return {}
    text = config.get("text_config")
    parts = [config, text] if isinstance(text, dict) else [config]
    is_part = isinstance(text, dict) and config.get("model_type") not in SEEING
    had = [part.pop("quantization_config", None) for part in parts]
    if is_fp8:
        config["quantization_config"] = quantization_config()
    if is_part:
        config["language_model_only"] = True
    is_requantized = is_fp8 or any(said is not None for said in had)
    if not is_requantized and not is_part:
        return {}
    folder = scratch / "model"
    folder.mkdir()
    for path in model.iterdir():
        if path.is_file() and not (is_requantized and path.suffix == ".safetensors"):
            (folder / path.name).symlink_to(path.resolve())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    flags: dict[str, Flag] = {"model_path": str(folder)}
    return flags | ({"load_format": "dummy"} if is_requantized else {})


def _adapter_flags(settings: GeneratorSettings) -> dict[str, Flag]:
    """Return the flags of an engine with several versions of adapters at a time.

    A batch may have answers of each version, and needs one place for answers without an adapter.
    The kernels are SGLang's default on a GPU; a CPU can only run torch's (the others are Triton's).
    """
    facts = settings.lora.facts().of_engine
    flags: dict[str, Flag] = {
        "enable_lora": True,
        "max_lora_rank": facts.rank,
        "lora_target_modules": sorted({t.rpartition(".")[2] for t in facts.targets}),
        "max_loras_per_batch": settings.num_kept_adapters + 1,
        "lora_strict_loading": True,
    }
    if settings.device == "cpu":
        flags["lora_backend"] = "torch_native"
    return flags


def random_api_key() -> str:
    """Return a key for one server; hexadecimal, since one that starts with - is read as a flag."""
    return secrets.token_hex(24)


def hash_seed(text: str) -> int:
    """Return a stable 31-bit seed for a text."""
    return zlib.crc32(text.encode()) & 0x7FFFFFFF


def environment_of(
    settings: GeneratorSettings,
    scratch: Path,
    node: EngineNode | None = None,
    *,
    torch: str | None = None,
) -> dict[str, str]:
    """Return the environment of a server.

    Args:
        settings: Settings of this generator.
        scratch: Private folder of the server.
        node: Part of an engine on several hosts; None for a whole engine.
        torch: Release of torch; None is the installed one.
    """
    environment = handed_on(
        os.environ,  # noqa: TID251 a child gets parts of it
        named=settings.generators.environment,
        prefixes=_VARIABLES_OF_ENGINES,
        setting="generators.environment",
    )
    environment |= {"TMPDIR": str(scratch), "HF_HUB_OFFLINE": "1"}
    environment[LEFT_OUT_VARIABLE] = str(scratch / LEFT_OUT_FILE)
    environment[GROUP_TIMEOUT_VARIABLE] = str(settings.weightbus.timeout_s)
    environment[SEEDS_VARIABLE] = str(int(settings.sampling.seed_per_sibling))
    environment["SGLANG_FORWARD_UNKNOWN_TOOLS"] = "1"  # the environment answers them
    # Longer than a client may stand still between taking a connection and asking; SGLang has 5 s.
    environment[_KEEP_ALIVE] = str(SERVER_KEEPS_S)
    environment[_FUSED_EXPERTS] = "0"
    environment[_CONVOLVED] = settings.dtype
    environment[ADAPTERS_VARIABLE] = str(int(settings.lora.is_named))
    environment[SHADOW_VARIABLE] = str(_shadows(settings))
    # Its ranks find each other through a file in the private folder. By itself SGLang opens a store
    # of torch, which listens on every interface and accepts writes from anyone.
    environment[_INIT_METHOD] = f"file://{scratch / _RENDEZVOUS}"
    # An engine outlives a relay that dies in a transfer.
    environment |= NCCL_ENVIRONMENT
    if release(torch or version("torch")) < _RUST_TREE_FROM:
        environment.setdefault(_TREE_CORE, "python")
    if settings.device == "cpu":
        # More than one thread per server collapses as soon as anything else needs a core.
        environment |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
        if settings.generators.num_ranks > 1:
            environment.setdefault(_CORES, cores_of_ranks(settings.generators.num_ranks))
            # SGLang takes a torch built for CUDA as proof that the machine has CUDA.
            environment[_NCCL_FILE] = "no NCCL on a CPU"
    if node is None:
        return environment | interface_variables(settings.weightbus.host, environment)
    environment |= _between_hosts(node)
    return environment | interface_variables(node.store.host, environment)


def _shadows(settings: GeneratorSettings) -> int:
    """Return the number of engines that share the memory for second copies; 0 if none is kept."""
    if not settings.keeps_shadow:
        return 0
    return max(1, settings.generators.count) if settings.device == "cpu" else 1


def _between_hosts(node: EngineNode) -> dict[str, str]:
    """Return the variables of a server whose engine is on several hosts."""
    variables = {
        _INIT_METHOD: f"tcp://{node.store}",
        # Node 0's server holds the store (server.py): no rank opens one on every interface.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        # SGLang's queues between hosts are ports of their own, which accept pickles from anyone.
        "SGLANG_USE_MESSAGE_QUEUE_BROADCASTER": "false",
        # Hosts may have different processors; their rounding may choose different tokens.
        "SYNC_TOKEN_IDS_ACROSS_TP": "1",
    }
    if node.received is not None:
        variables[RECEIVED_VARIABLE] = str(node.received)
    return variables


def release(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version, ``2.11.0+cu130``."""
    return tuple(int(number) for number in version.split("+")[0].split(".")[:2])


def cores_of_ranks(num_ranks: int) -> str:
    """Return a core for each rank of an engine on a CPU in SGLang's form; few cores are shared.

    By itself SGLang takes a NUMA node for each rank, and fails if there are fewer.
    """
    cores = sorted(os.sched_getaffinity(0))
    return "|".join(str(cores[rank % len(cores)]) for rank in range(num_ranks))
