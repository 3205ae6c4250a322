import argparse
import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.deploy.commands import align
from slipstream.wire.errors import ConfigError
from slipstream.wire.process.stopping import STOP_SIGNALS
from tests.support.family_models import SHAPE
from tests.support.signals import signals_as_before


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    with signals_as_before():
        yield


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    align.add_arguments(parser)
    return parser.parse_args(words)


def test_tokens_are_the_same_for_a_seed_and_of_unlike_lengths():
    sequences = align.chosen_tokens(50, 4, 16, 3)
    assert sequences == align.chosen_tokens(50, 4, 16, 3) != align.chosen_tokens(50, 4, 16, 4)
    assert [len(one) for one in sequences] == [16, 11, 6, 3]
    assert all(0 <= token < 50 for one in sequences for token in one)


def test_what_cannot_be_compared_is_refused(tmp_path: Path):
    for words, message in [
        (["--tokens", "2"], "--tokens at least 3, got 4 and 2"),
        (["--sequences", "0"], "--sequences must be at least 1"),
        (["--without", "engine", "--without", "transformers"], "leaves nothing to compare with"),
        (["--tolerance", "nan"], "--tolerance must be a number from 0, got nan"),
        (["--tolerance", "-1"], "--tolerance must be a number from 0, got -1"),
        ([], r"no config.json in .* \(a run has "),
    ]:
        with pytest.raises(ConfigError, match=message):
            align.main(parsed(str(tmp_path), *words))


def test_more_tokens_than_a_model_has_positions_for_are_refused(tmp_path: Path):
    for words, message in [
        (["--tokens", "300"], "max_position_embeddings = 256 of run.model, got 300"),
        (["--sequences", "9000"], "at most 65536, got 9000 and 32"),
    ]:
        config = {**SHAPE, "model_type": "llama", "pad_token_id": None}
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ConfigError, match=message):
            align.main(parsed(str(tmp_path), *words))


def test_a_signal_to_end_ends_what_align_has_started(tmp_path: Path):
    with pytest.raises(ConfigError):
        align.main(parsed(str(tmp_path)))
    for one in STOP_SIGNALS:
        with pytest.raises(SystemExit):
            signal.raise_signal(one)
