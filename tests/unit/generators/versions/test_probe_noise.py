"""What is taken for noise, and what for a fault."""

import math
import random

import pytest

from slipstream.generators.versions.probe_noise import (
    CALIBRATION,
    LogprobDifference,
    Noise,
    difference,
)

ALARMS = 10_000  # publishes without a false one


def test_differences_are_of_all_tokens():
    found = difference([[-1.0, -2.0], [-3.0, -4.0]], [[-1.5, -2.0], [-3.0, -3.75]])
    assert found == LogprobDifference(0.1875, 0.5)
    assert str(found) == "0.188 nats on average, 0.5 at worst"


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf])
def test_no_number_is_infinitely_far(value: float):
    assert difference([[value, -2.0]], [[-1.0, -2.0]]) == LogprobDifference(math.inf, math.inf)
    assert not Noise("bfloat16").is_noise(difference([[value]], [[-1.0]]))


def learned(
    dtype: str, *found: LogprobDifference, has_experts: bool = False, limit: float = 0.0
) -> Noise:
    noise = Noise(dtype, has_experts=has_experts, limit=limit)
    assert all(noise.is_noise(one) for one in found)
    return noise


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 0.02), ("bfloat16", 0.3)])
def test_before_any_probe_only_the_limit_counts(dtype: str, limit: float):
    assert not Noise(dtype).is_noise(LogprobDifference(1.01 * limit, limit))
    assert not Noise(dtype).is_noise(LogprobDifference(limit, 16.1 * limit))
    assert Noise(dtype).is_noise(LogprobDifference(0.99 * limit, 15.9 * limit))
    assert Noise(dtype, limit=5.0).is_noise(LogprobDifference(4.9, 70.0))


def test_the_bound_closes_in_on_the_noise_with_every_probe():
    noise = Noise("bfloat16")
    bounds = []
    for _ in range(CALIBRATION):
        assert noise.is_noise(LogprobDifference(0.016, 0.06))
        bounds.append(noise.bound)
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[0] == LogprobDifference(0.3, 4.8)  # 16 times as wide, and not above the limit
    assert bounds[-1] == pytest.approx(LogprobDifference(2.5 * 0.016, 8 * 0.06))
    assert not noise.is_noise(LogprobDifference(0.041, 0.06))
    assert not noise.is_noise(LogprobDifference(0.016, 0.49))


def test_noise_is_not_learned_for_ever():
    """A fault that grows slowly does not become the noise that it is compared with."""
    noise = learned("bfloat16", *[LogprobDifference(0.016, 0.06)] * CALIBRATION)
    drift = 0.016
    while noise.is_noise(LogprobDifference(drift, 4 * drift)):
        drift *= 1.01
    assert drift < 0.05


def test_a_fault_that_grows_from_the_start_is_caught_by_the_first_probes():
    """As of adapters that are never applied, which add nothing at first."""
    noise, step = Noise("float32"), 0
    while noise.is_noise(LogprobDifference(1e-7 + 1e-3 * step, 5e-7 + 4e-3 * step)):
        step += 1
    assert step == 1


def test_less_than_the_floor_is_always_noise():
    exact = [LogprobDifference(0.0, 0.0)] * CALIBRATION
    assert learned("float32", *exact).bound == LogprobDifference(2e-5, 16 * 2e-5)
    assert learned("float32", *exact, has_experts=True).bound == LogprobDifference(5e-3, 16 * 5e-3)


# Of real publishes to SGLang on a CPU (docs/weight-bus.md): the median, and the deviation of the
# logarithm, of the mean over 96 tokens and of the worst of them; how much more is drawn here.
MEASURED = {
    "dense float32": ("float32", False, (9.4e-8, 0.19), (4.8e-7, 0.08), 2.0),
    "dense bfloat16": ("bfloat16", False, (1.63e-2, 0.07), (6.0e-2, 0.19), 2.0),
    "experts bfloat16": ("bfloat16", True, (5.3e-2, 0.16), (0.515, 0.56), 1.0),
    # 41 publishes each of random models that change much: deviations are those of one to the next.
    "dense fp8": ("fp8", False, (4.5e-2, 0.078), (0.175, 0.23), 2.0),
    "experts fp8": ("fp8", True, (8.5e-2, 0.105), (0.321, 0.194), 2.0),
}


@pytest.mark.parametrize("name", MEASURED)
def test_no_alarm_in_many_honest_publishes(name: str):
    dtype, has_experts, mean, worst, more = MEASURED[name]
    draw = random.Random(f"{name} 1")

    def one(of: tuple[float, float]) -> float:
        return draw.lognormvariate(math.log(of[0]), more * of[1])

    alarms = []
    for _ in range(5):  # engines
        noise = Noise(dtype, has_experts=has_experts)
        for _ in range(ALARMS):
            found = LogprobDifference(one(mean), one(worst))
            if not noise.is_noise(found):
                alarms.append(found)
    assert alarms == []
