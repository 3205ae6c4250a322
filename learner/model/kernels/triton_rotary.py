"""Triton kernel that turns heads: a program computes some heads of a token, in float32.

Every channel is read once and written once.
"""
# ruff: noqa: ANN001, ANN202, N803 - Triton's language has types and names of its own
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor

_PER_WARP = 256  # channels of a half: 16 bytes of bfloat16 for each of 32 threads
_MOST_WARPS = 4


def turned(
    heads: Tensor, cos: Tensor, sin: Tensor, *, in_pairs: bool, first: int, is_back: bool
) -> Tensor:
    """Take and return what torch's operators do in kernels/rotary.py."""
    tokens, count, channels = heads.shape
    half = cos.size(-1)
    result = heads.new_empty(heads.shape)
    columns = triton.next_power_of_2(half)
    rows = min(triton.next_power_of_2(count), max(_MOST_WARPS * _PER_WARP // columns, 1))
    _rotary_turn[(tokens, triton.cdiv(count, rows))](
        heads,
        cos.contiguous(),
        sin.contiguous(),
        result,
        *heads.stride(),
        count,
        CHANNELS=channels,
        HALF=half,
        FIRST=first,
        IN_PAIRS=in_pairs,
        IS_BACK=is_back,
        ROWS=rows,
        COLUMNS=columns,
        STILL=triton.next_power_of_2(channels - 2 * half) if channels > 2 * half else 0,
        num_warps=max(rows * columns // _PER_WARP, 1),
    )
    return result


@triton.jit
def _rotary_turn(
    heads,
    cos,
    sin,
    result,
    token_stride,
    head_stride,
    channel_stride,
    count,
    CHANNELS: tl.constexpr,
    HALF: tl.constexpr,
    FIRST: tl.constexpr,
    IN_PAIRS: tl.constexpr,
    IS_BACK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STILL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * ROWS + tl.arange(0, ROWS))[:, None]
    sources = heads + token * token_stride + head * head_stride
    results = result + (token * count + head) * CHANNELS
    angle = tl.arange(0, COLUMNS)[None, :]
    cosine = tl.load(cos + token * HALF + angle, angle < HALF, other=0.0)
    sine = tl.load(sin + token * HALF + angle, angle < HALF, other=0.0)
    if IS_BACK:
        sine = -sine
    if IN_PAIRS:
        channel = tl.arange(0, 2 * COLUMNS)[None, :]
        is_inside = (head < count) & (channel < 2 * HALF)
        pairs = tl.load(sources + (FIRST + channel) * channel_stride, is_inside, other=0.0)
        x, y = tl.split(tl.reshape(pairs.to(tl.float32), (ROWS, COLUMNS, 2)))
        turned_pairs = tl.join(x * cosine - y * sine, y * cosine + x * sine)
        value = tl.reshape(turned_pairs, (ROWS, 2 * COLUMNS))
        tl.store(results + FIRST + channel, value, is_inside)
    else:
        is_inside = (head < count) & (angle < HALF)
        start = sources + (FIRST + angle) * channel_stride
        x = tl.load(start, is_inside, other=0.0).to(tl.float32)
        y = tl.load(start + HALF * channel_stride, is_inside, other=0.0).to(tl.float32)
        tl.store(results + FIRST + angle, x * cosine - y * sine, is_inside)
        tl.store(results + FIRST + HALF + angle, y * cosine + x * sine, is_inside)
    if STILL > 0:
        still = tl.arange(0, STILL)[None, :]
        is_inside = (head < count) & (still < CHANNELS - 2 * HALF)
        place = still if FIRST > 0 else still + 2 * HALF
        value = tl.load(sources + place * channel_stride, is_inside, other=0.0)
        tl.store(results + place, value, is_inside)
