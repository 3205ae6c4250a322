"""What a rank computes between the beginning of a schedule and its last pass."""

from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from slipstream.learner.training.pipeline_clock import PipelineClock, bubble_share


def timed(*moments: float) -> tuple[PipelineClock, SimpleNamespace]:
    marks = iter(moments)
    return PipelineClock(mark=lambda: next(marks)), SimpleNamespace(timers=None)


def passes(config: SimpleNamespace, *names: str) -> None:
    """Ask for timers as Megatron does."""
    config.timers("forward-backward", log_level=1).start(barrier=True)
    for name in names:
        config.timers(name, log_level=2).start()
        config.timers(name).stop()
    config.timers("all-grads-sync", log_level=1).start(barrier=False)
    config.timers("all-grads-sync").stop()
    config.timers("forward-backward").stop()


def test_a_rank_s_passes_and_its_span_up_to_the_last_of_them():
    clock, config = timed(1.0, 2.0, 4.0, 7.0, 12.0, 20.0, 21.0, 22.0, 30.0, 31.0)
    with clock.timing(config):
        passes(config, "forward-compute", "forward-recv", "backward-compute")
        passes(config, "forward-compute", "backward-compute")
    assert config.timers is None, "others are not timed"
    assert clock.take() == [(2.0 + 5.0, 11.0), (1.0 + 1.0, 11.0)]
    assert clock.take() == [], "each update counts once"


def test_an_error_ends_the_timing():
    clock, config = timed()
    with pytest.raises(ValueError, match="of the model"), clock.timing(config):
        raise ValueError("of the model")
    assert config.timers is None


@pytest.fixture
def _one_rank() -> Iterator[None]:
    dist.init_process_group(
        "gloo", store=HashStore(), rank=0, world_size=1, timeout=timedelta(minutes=10)
    )
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_one_rank")
def test_the_bubble_is_what_no_pass_fills():
    assert bubble_share([(6.0, 8.0), (3.0, 4.0)]) == pytest.approx(0.25)
    assert bubble_share([]) is None
