import pytest

from slipstream.learner.collective_errors import is_of_collective
from slipstream.learner.nodes.watch import EXIT_COLLECTIVE, end_of_ranks
from slipstream.wire.errors import PublishError


@pytest.mark.parametrize(
    ("error", "is_so"),
    [
        (RuntimeError("[third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed"), True),
        (RuntimeError("NCCL error in: ncclRemoteError"), True),
        (RuntimeError("out of memory"), False),
        (PublishError("gloo is torn"), False),
    ],
)
def test_an_error_of_a_collective_is_known_by_its_text(error: BaseException, *, is_so: bool):
    assert is_of_collective(error) == is_so


@pytest.mark.parametrize(
    ("codes", "text", "is_caused"),
    [
        ({}, "", False),
        ({3: -9, 2: 1}, "its rank 2 ended with code 1", False),
        ({3: EXIT_COLLECTIVE}, f"its rank 3 ended with code {EXIT_COLLECTIVE}", True),
        ({2: EXIT_COLLECTIVE, 3: -9}, "its rank 3 ended with code -9", False),
        ({2: -6}, "its rank 2 ended with code -6", True),  # NCCL's watchdog
    ],
)
def test_a_rank_that_died_here_is_told_with_its_code(
    codes: dict[int, int], text: str, *, is_caused: bool
):
    assert end_of_ranks(codes) == (text, is_caused)
