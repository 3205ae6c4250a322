"""Settings of the generators."""

from pathlib import Path
from typing import Literal

import msgspec

from weightbus.config import WeightBusSection
from wire.errors import ConfigError
from wire.run_settings import (
    AtLeast1,
    EvalSection,
    Positive,
    RunSection,
    SamplingSection,
    model_folder,
    run_section,
)
from wire.settings import Section, Table, section

Device = Literal["cpu", "cuda"]


_OURS = ("model_path", "host", "port", "api_key", "device", "dtype", "max_running_requests")
_ONE_RANK = ("tp_size", "pp_size", "dp_size")


class GeneratorsSection(Section, frozen=True, kw_only=True):
    """[generators]: the inference engines and their agents."""

    count: AtLeast1 = 2
    """Generators that `slipstream run` starts."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the engine runs; auto takes a GPU if there is one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the engine's weights; auto is float32 on a CPU, bfloat16 on a GPU."""
    max_sequences: AtLeast1 = 64
    """Trajectories that one engine generates at a time."""
    siblings_together: bool = False
    """Send the siblings of a group to the engine in one request: half the CPU time for short
    answers, but siblings arrive when the longest is finished."""
    max_cached_tokens: AtLeast1 = 16384
    """Size of the engine's KV cache on a CPU, in tokens."""
    start_timeout_s: Positive = 180.0
    """An engine that does not answer this long after its start has failed."""
    request_timeout_s: Positive = 600.0
    """A generation that takes longer has failed; its lease is handed back."""
    sglang: dict[str, str | int | float | bool] = msgspec.field(default_factory=dict)
    """Passed on to SGLang: names of its settings with underscores, as in max_prefill_tokens."""


class GeneratorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """All that one generator reads."""

    run: RunSection
    sampling: SamplingSection
    eval: EvalSection
    generators: GeneratorsSection
    weightbus: WeightBusSection

    @property
    def model(self) -> Path:
        """Return the folder of the policy to start from."""
        return Path(self.run.model)

    @property
    def device(self) -> Device:
        """Return where the engine runs."""
        if self.generators.device != "auto":
            return self.generators.device
        return "cuda" if Path("/proc/driver/nvidia/gpus").exists() else "cpu"

    @property
    def dtype(self) -> str:
        """Return the type of the engine's weights."""
        if self.generators.dtype != "auto":
            return self.generators.dtype
        return "float32" if self.device == "cpu" else "bfloat16"


def generator_settings(table: Table) -> GeneratorSettings:
    """Decode and check the generators' sections."""
    settings = GeneratorSettings(
        run=run_section(table),
        sampling=section(table, "sampling", SamplingSection),
        eval=section(table, "eval", EvalSection),
        generators=section(table, "generators", GeneratorsSection),
        weightbus=section(table, "weightbus", WeightBusSection),
    )
    model_folder(settings.run)
    sampling = settings.sampling
    if sampling.min_response_tokens > sampling.max_response_tokens:
        raise ConfigError(
            f"sampling.min_response_tokens = {sampling.min_response_tokens} is more than "
            f"sampling.max_response_tokens = {sampling.max_response_tokens}"
        )
    if settings.generators.max_sequences < settings.run.group_size:
        raise ConfigError(
            f"generators.max_sequences = {settings.generators.max_sequences} does not hold one "
            f"group of run.group_size = {settings.run.group_size}"
        )
    _check_sglang(settings.generators.sglang)
    longest = sampling.max_prompt_tokens + sampling.max_response_tokens
    if settings.device == "cpu" and settings.generators.max_cached_tokens < longest:
        raise ConfigError(
            f"generators.max_cached_tokens = {settings.generators.max_cached_tokens} does not "
            f"hold one trajectory of sampling.max_prompt_tokens + max_response_tokens = {longest}"
        )
    return settings


def _check_sglang(table: dict[str, str | int | float | bool]) -> None:
    for name, value in table.items():
        if "-" in name:
            raise ConfigError(
                f"generators.sglang.{name}: write it with underscores, {name.replace('-', '_')}"
            )
        if name in _OURS:
            raise ConfigError(f"generators.sglang.{name} follows from other settings")
        if name in _ONE_RANK and value != 1:
            raise ConfigError(
                f"generators.sglang.{name} must be 1: engines of several ranks cannot receive "
                f"weights yet, got {value}"
            )
        if value is False:
            raise ConfigError(
                f"generators.sglang.{name} = false: SGLang's flags can only be switched on"
            )
