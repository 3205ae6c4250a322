"""Pure: adapters that SGLang 0.5.23 can hold next to the weights, several versions at a time.

Read in its srt/lora: lora.py (names that it fuses), lora_manager.py (modules that it wraps),
mem_pool.py (places of adapters). ``tests/integration/test_lora_experts_served.py`` asks it.
"""

from collections.abc import Collection, Iterator

from slipstream.wire.models.adapters import is_target, target_layers
from slipstream.wire.models.families.tables import INNER_MULTIPLE
from slipstream.wire.models.hf_config import HfConfig

# Projections that SGLang fuses, and those of them without which it leaves the others out.
_FUSED = (
    (("q_proj", "k_proj", "v_proj"), ("q_proj", "v_proj")),
    (("up_proj",), ("gate_proj",)),
    (("w3",), ("w1",)),
)
_COMPRESSING = ("q_a_proj", "kv_a_proj_with_mqa")
_GATES, _DOWN = ("gate_proj", "w1"), ("down_proj", "w2")


def trouble_next_to_weights(
    hf: HfConfig, targets: Collection[str], *, on_cpu: bool, ranks: int = 1
) -> str:
    """Return why an engine cannot hold adapters of these targets next to its weights; "" if it can.

    Args:
        hf: the model.
        targets: names as in lora.targets.
        on_cpu: True if the engine is on a CPU.
        ranks: its tensor-parallel ranks.
    """
    if hf.quantization_config is not None:
        return (
            "run.model is quantized, and an engine of such a model begins with made-up weights, "
            "to which adapters cannot be added"
        )
    layers = [layer for layer in target_layers(hf) if is_target(layer, targets)]
    return next(_troubles(hf, layers, on_cpu=on_cpu, ranks=ranks), "")


def _troubles(hf: HfConfig, layers: Collection[str], *, on_cpu: bool, ranks: int) -> Iterator[str]:
    named = {layer.removesuffix(".weight").rpartition(".")[2] for layer in layers}
    if any(not layer.endswith(".weight") for layer in layers):
        yield (
            f"{hf.model_type} has the weights of all experts of a layer in one tensor, and SGLang "
            "loads adapters of experts by their numbers alone"
        )
    if inputs := sorted(name for name in named if name.startswith("in_proj")):
        yield f"SGLang has no adapters of linear attention's {', '.join(inputs)}"
    if hf.family.is_latent:
        yield from _of_latents(hf, named)
    else:
        yield from _without(named, _FUSED[0])
    for fused in _FUSED[1:]:
        yield from _without(named, fused)
    routed = [layer for layer in layers if ".experts.*." in layer]
    if routed and not (named & {*_GATES} and named & {*_DOWN}):
        yield (
            "SGLang leaves adapters of experts out unless lora.targets names both "
            f"{' and '.join(_DOWN[:1] + _GATES[:1])}"
        )
    if on_cpu:
        yield from _padded(hf, layers, INNER_MULTIPLE * ranks)


def _without(
    named: Collection[str], fused: tuple[tuple[str, ...], tuple[str, ...]]
) -> Iterator[str]:
    some, needed = fused
    found = [name for name in some if name in named]
    missing = [name for name in needed if name not in named]
    if found and missing:
        yield (
            f"lora.targets names {', '.join(found)} without {', '.join(missing)}, and SGLang would "
            "leave it out"
        )


def _of_latents(hf: HfConfig, named: Collection[str]) -> Iterator[str]:
    if hf.q_lora_rank:
        for some, other in (_COMPRESSING, _COMPRESSING[::-1]):
            yield from _without(named, ((some,), (other,)))
        return
    if alone := [name for name in ("q_proj", _COMPRESSING[1]) if name in named]:
        yield (
            f"SGLang has no adapters of {', '.join(alone)} in latent attention whose queries are "
            "not compressed"
        )


def _padded(hf: HfConfig, layers: Collection[str], multiple: int) -> Iterator[str]:
    """Yield the widths that SGLang pads on a CPU, where it has no place for adapters of them."""
    sizes = hf.sizes
    widths = {
        "intermediate_size": sizes["inner"] * any(_is_dense(layer) for layer in layers),
        "moe_intermediate_size": sizes["expert_inner"] * any(".experts." in n for n in layers),
        "shared_expert_intermediate_size": sizes["shared_inner"]
        * any(".shared_expert" in layer for layer in layers),
    }
    for name, width in widths.items():
        if width % multiple:
            yield (
                f"{name} = {width} of run.model is no multiple of {multiple}: SGLang on a CPU pads "
                "such an MLP, and has no place for adapters of it"
            )


def _is_dense(layer: str) -> bool:
    parts = layer.removesuffix(".weight").split(".")
    return len(parts) == 2 and parts[0] == "mlp"
