import argparse
from pathlib import Path

import pytest

from slipstream.deploy.commands import align
from slipstream.wire.errors import ConfigError


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    align.add_arguments(parser)
    return parser.parse_args(words)


def test_tokens_are_the_same_for_a_seed_and_of_unlike_lengths():
    sequences = align.chosen_tokens(50, 4, 16, 3)
    assert sequences == align.chosen_tokens(50, 4, 16, 3) != align.chosen_tokens(50, 4, 16, 4)
    assert [len(one) for one in sequences] == [16, 11, 6, 3]
    assert all(0 <= token < 50 for one in sequences for token in one)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tokens", "2"], "--tokens at least 3, got 4 and 2"),
        (["--sequences", "0"], "--sequences must be at least 1"),
        (["--without", "engine", "--without", "transformers"], "leaves nothing to compare with"),
        ([], "is no run .* and no model"),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path: Path, words: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        align.main(parsed(str(tmp_path), *words))
