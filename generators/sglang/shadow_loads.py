"""SGLang 0.5.23 with a shadow of its weights (``weight_shadow``): where it is made and used."""

import gc
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Literal

from slipstream.generators.sglang.ranks import failure_of, of_all_ranks
from slipstream.generators.sglang.replacing import replace
from slipstream.generators.versions.shadow_state import Readiness, has_room
from slipstream.wire.errors import PublishError

SHADOW_VARIABLE = "SLIPSTREAM_SHADOW"
"""Engines that share the memory of a device, each with a shadow if there is room; 0: none has."""
Staged = Literal["no shadow", "loading", "ready"]
_log = logging.getLogger(__name__)
_GIB = 2**30


def keep_shadow(module: ModuleType) -> None:
    """Allocate a shadow after the model's load: SGLang gives its cache what remains.

    Its memory must leave three quarters of what the cache would get. Models whose weights SGLang
    itself refuses to update have none.
    """
    runner = module.ModelRunner
    load = runner.load_model

    def load_model(self: Any) -> None:  # noqa: ANN401
        load(self)
        self.weight_shadow = None
        share = int(os.environ.get(SHADOW_VARIABLE, "0"))  # noqa: TID251 reaches spawned processes
        if share and not self.is_draft_worker and self.startup_weight_load is None:
            self.weight_shadow = _shadow_of(self, module, share)

    replace(runner, "load_model", load_model)


def _shadow_of(runner: Any, module: ModuleType, share: int) -> object | None:  # noqa: ANN401
    import torch  # in the process of the weights, not in the agent's

    from slipstream.generators.sglang.weight_shadow import WeightShadow

    updater = sys.modules[module.WeightUpdater.__module__]
    live, device = runner.model, torch.device(runner.device)
    if updater._unsupported_derived_weight_cache_error(live) is not None:
        return None
    if device.type == "cuda":
        device = torch.device("cuda", runner.gpu_id)
    gc.collect()  # SGLang does so before it sizes its cache
    parallel = module.get_parallel()
    free_gib = module.get_available_gpu_memory(
        runner.device,
        runner.gpu_id,
        distributed=parallel.launch_world_size > 1,
        cpu_group=parallel.world_group.cpu_group,
    )
    free_gib -= runner.pre_model_load_memory * (1 - runner.mem_fraction_static)
    free_gib /= share
    num_bytes = sum(weight.numel() * weight.element_size() for weight in live.parameters())
    fits = has_room(num_bytes, free=free_gib * _GIB)
    if not all(of_all_ranks(fits, parallel.world_group.cpu_group)):
        _log.warning(
            "no shadow of %.2f GB: the cache gets %.2f GB, and must keep three quarters of it; "
            "versions are loaded while the engine stands still",
            num_bytes / 1e9,
            free_gib * _GIB / 1e9,
        )
        return None
    loader = updater.DefaultModelLoader

    def load(model: torch.nn.Module, weights: Any) -> None:  # noqa: ANN401
        loader.restore_weights_before_loading(model, device)
        loader.load_weights_and_postprocess(model, weights, device)

    def checksums(model: torch.nn.Module) -> Any:  # noqa: ANN401
        return module.WeightChecker(get_model=lambda: model).handle("checksum", role="target")

    try:
        return WeightShadow(live, load, checksums, device=device)
    except PublishError as error:
        _log.warning("no shadow: %s", error)
        return None


def stage(manager: Any, folder: str, version: str) -> tuple[Staged, dict[str, float]]:  # noqa: ANN401
    """Ask the shadows of all ranks of an engine for a version; ask again while it is loading.

    Returns:
        The version's state, and the seconds by phase that this rank's load took.

    Raises:
        PublishError: a rank could not load it.
    """
    shadow = getattr(manager.tp_worker.model_runner, "weight_shadow", None)
    if shadow is None:
        return "no shadow", {}
    step = shadow.ask(Path(folder), version)
    if step.why:
        _log.error("%s was not loaded: %s", version, step.why)
    ranks = of_all_ranks(step.readiness, manager.tp_cpu_group)
    match Readiness(min(ranks)):
        case Readiness.FAILED:
            raise PublishError(step.why or failure_of(ranks.index(Readiness.FAILED)))
        case Readiness.LOADING:
            return "loading", {}
        case Readiness.READY:
            seconds = {"stage": shadow.loaded.load_s, "prove": shadow.loaded.check_s}
            return "ready", seconds


def check(manager: Any, version: str) -> None:  # noqa: ANN401
    """Check that the shadows of all ranks hold a version.

    Raises:
        PublishError: one does not.
    """
    shadow = getattr(manager.tp_worker.model_runner, "weight_shadow", None)
    _on_all_ranks(manager, lambda: shadow.check(version) if shadow else _without())


def forget(manager: Any) -> None:  # noqa: ANN401
    """Have the shadow of this rank hold nothing."""
    manager.tp_worker.model_runner.weight_shadow.forget()


def checksums(manager: Any, request: Any) -> Any:  # noqa: ANN401
    """Return SGLang's answer to a request for checksums, of what all ranks have in their shadow."""
    runner = manager.tp_worker.model_runner
    of_live, of_shadow = runner._weight_checker, runner.weight_shadow.loaded.checksums
    runner._weight_checker = SimpleNamespace(handle=lambda **_named: of_shadow)
    try:
        return manager.check_weights(request)
    finally:
        runner._weight_checker = of_live


def copy_over(manager: Any, version: str) -> None:  # noqa: ANN401
    """Copy a version from the shadow of each rank over its live weights.

    Raises:
        PublishError: a rank's shadow does not hold it, or its device fails.
    """
    shadow = manager.tp_worker.model_runner.weight_shadow
    _on_all_ranks(manager, lambda: shadow.adopt(version))


def _on_all_ranks(manager: Any, work: Callable[[], None]) -> None:  # noqa: ANN401
    """Do something on every rank; raise PublishError on each if one failed."""
    why = ""
    try:
        work()
    except (PublishError, RuntimeError) as error:  # a device fails
        why = str(error) or repr(error)
        _log.error("%s", why)
    succeeded = of_all_ranks(not why, manager.tp_cpu_group)
    if not all(succeeded):
        raise PublishError(why or failure_of(succeeded.index(0)))


def _without() -> None:
    raise PublishError("this engine has no shadow")
