"""Pure: how an engine runs on its device, with the packages that are installed.

What is not named here is SGLang's own default: on a GPU, CUDA graphs of decoding and of prefill,
and the attention that it prefers there.
"""

from collections.abc import Set
from importlib.util import find_spec
from typing import NamedTuple, TypeAlias

from slipstream.generators.config import MOE_RUNNER, GeneratorSettings

Flag: TypeAlias = str | int | float | bool | list[str]

_ATTENTION = frozenset({"flashinfer", "aiter"})  # packages of NVIDIA's and of AMD's GPUs
_GRAMMARS = "xgrammar"
# A batch with a turn's new tokens takes longer than a decode step, for all lanes. With this many
# steps between such batches, the turns that begin meanwhile share one.
_STEPS_BETWEEN_PREFILLS = 8


class DeviceDefaults(NamedTuple):
    """Defaults of one engine."""

    flags: dict[str, Flag]  # SGLang's settings
    freezes_collectors: bool  # its processes' garbage collectors, once it has started


def installed_packages() -> frozenset[str]:
    """Return which of the packages that matter here are installed; none is imported."""
    return frozenset(name for name in (*_ATTENTION, _GRAMMARS) if find_spec(name) is not None)


def device_defaults(settings: GeneratorSettings, packages: Set[str]) -> DeviceDefaults:
    """Return an engine's defaults.

    Args:
        settings: Settings of a generator.
        packages: Packages that are installed, see ``installed_packages``.
    """
    everywhere: dict[str, Flag] = {"enable_mixed_chunk": True} if _mixes(settings) else {}
    if settings.has_windows:
        # Its cache of windows is another one, which keeps less: sessions and routing replay know
        # the usual one alone.
        everywhere["disable_hybrid_swa_memory"] = True
    if settings.has_experts:
        everywhere["moe_runner_backend"] = MOE_RUNNER
    if settings.device == "cpu":
        return DeviceDefaults(_on_cpu(settings) | everywhere, freezes_collectors=False)
    flags: dict[str, Flag] = {
        **everywhere,
        # A pause in place leaves a batch of the old weights unread.
        "disable_overlap_schedule": settings.weightbus.in_flight == "in_place",
    }
    if settings.weightbus.is_fp8:
        # Other kernels rewrite scales after they were loaded.
        flags["fp8_gemm_runner_backend"] = "triton"
    if settings.environment.is_named:
        flags["prefill_decode_interval"] = _STEPS_BETWEEN_PREFILLS
        # After new weights all prompts are prefilled again: half of the lanes fill at once.
        flags["prefill_decode_interval_min_bs"] = settings.generators.max_sequences // 2
    if not packages & _ATTENTION:
        flags |= {"attention_backend": "triton", "sampling_backend": "pytorch"}
    if _GRAMMARS not in packages:
        flags["grammar_backend"] = "none"
    # On several hosts the order to freeze would pass through every rank's queue.
    return DeviceDefaults(flags, freezes_collectors=settings.generators.nodes == 1)


def _mixes(settings: GeneratorSettings) -> bool:
    """Return whether lanes are decoded in the batch that prefills a turn of others.

    Without turns a lane is prefilled once, mostly from the cache, for siblings share the prompt.
    Pauses in place and several groups of attention, which agree on the kind of each batch, have no
    test that shows exact logprobs of such batches.
    """
    return (
        settings.environment.is_named
        and settings.weightbus.in_flight == "retract"
        and settings.generators.attention_groups == 1
    )


def _on_cpu(settings: GeneratorSettings) -> dict[str, Flag]:
    """Return the settings on a CPU, whose processes are forked with frozen collectors."""
    generators = settings.generators
    num_running = generators.max_sequences + settings.num_probe_sequences
    if generators.attention_groups > 1 and generators.expert_groups > 1:
        # Outputs of experts would be summed by a collective that needs NCCL.
        summing: dict[str, Flag] = {"boundary_reduction": "rs"}
    else:
        summing = {}
    return summing | {
        # Nothing to overlap: the same cores plan a batch and compute it.
        "disable_overlap_schedule": True,
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "disable_cuda_graph": True,
        # The number of tokens bounds the memory. While it loads, SGLang counts the memory of
        # other programs on this host as its own, and gives up above this share.
        "mem_fraction_static": 0.9,
        "max_total_tokens": generators.max_cached_tokens,
        # Recurrent states of linear attention, for which SGLang takes half of the memory: three for
        # each answer under way, as it counts them, and as many of cached prefixes.
        "max_mamba_cache_size": 6 * num_running,
        "sleep_on_idle": True,
    }
