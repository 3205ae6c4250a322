"""Pure: whether a folder's numbers are weights, or come with the scales that make them weights."""

from collections.abc import Sequence

from slipstream.wire.models.families.registry import SCALE_SUFFIX

FLOATS = ("BF16", "F16", "F32", "F64")  # safetensors' types of plain weights
QUANTIZED = "F8_E4M3"  # type of weights in blocks, each with a scale


def number_trouble(
    name: str,
    dtype: str,
    shape: Sequence[int],
    block: tuple[int, int] | None,
    scales: Sequence[int] | None,
) -> str:
    """Return why a tensor cannot be read as weights; empty if it can.

    Args:
        name: the tensor's name.
        dtype: the tensor's type, by its name in safetensors.
        shape: the tensor's shape.
        block: rows and columns of a block, if the folder's config.json has blocks.
        scales: shape of the tensor's scales, if it comes with scales.
    """
    floats = ", ".join(FLOATS)
    if dtype in FLOATS:
        if block is None or scales is None:
            return ""
        return (
            f"tensor {name} is {dtype} and comes with scales ({name}{SCALE_SUFFIX}), expected "
            f"{QUANTIZED} with scales or {floats} without"
        )
    if dtype != QUANTIZED or block is None or len(shape) != 2:
        return (
            f"tensor {name} is {dtype}, expected {floats}, or {QUANTIZED} of two axes with "
            "quantization_config in config.json"
        )
    if scales is None:
        return f"tensor {name} is {dtype}, and its scales are missing ({name}{SCALE_SUFFIX})"
    want = [-(-size // of) for size, of in zip(shape, block, strict=True)]
    if list(scales) != want:
        return (
            f"tensor {name}{SCALE_SUFFIX} must have shape {want} for blocks of {list(block)}, got "
            f"{list(scales)}"
        )
    return ""
