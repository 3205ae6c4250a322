"""Generating without a run: what becomes of prompts that fail, and how a file is continued."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from slipstream.broker.data.sources import load_training_prompts
from slipstream.broker.reward_worker.pool import RewardPool
from slipstream.broker.rewards.loading import load_function
from slipstream.broker.rewards.outcomes import RewardOutcome, outcome_of, score_of, unavailable
from slipstream.generators.engine import Completion, SamplingParams
from slipstream.generators.rollout import Sampler
from slipstream.generators.sglang.running import sampling_by_item
from slipstream.generators.text.codec import TextCodec
from slipstream.generators.tools import offline
from slipstream.generators.tools.offline import OfflineGeneration, answered_positions
from slipstream.generators.tools.offline_config import OfflineSettings, offline_settings
from slipstream.wire.errors import ConfigError, EngineError
from slipstream.wire.files.trajectory_file import NOT_TRAINED, TrajectoryFileWriter, read_groups
from slipstream.wire.messages.broker import ScoringItem
from slipstream.wire.messages.codec import decode_payload, decode_transcript
from slipstream.wire.messages.trajectory import Score, Transcript
from tests.support.blank_model import write_blank_model
from tests.support.canned_engine import CannedEngine, completion

REFUSING = "{% if messages[0].content == '3' %}{{ raise_exception('no 3') }}{% endif %}1+1="


class Failing(CannedEngine):
    """Fails at its first calls."""

    def __init__(self, failures: int) -> None:
        super().__init__()
        self.failures = failures

    def answers(self, count: int) -> list[Completion]:
        if len(self.asked) <= self.failures:
            raise EngineError("out of memory")
        return [completion(5, 2)] * count


class InProcess:
    """Scores by exact match, last sibling first; some answers have no reward."""

    def __init__(self, *unavailable_groups: int) -> None:
        self.function = load_function("slipstream.broker.rewards.exact_match:score", {})
        self.unavailable_groups = unavailable_groups

    async def score(
        self, work: Sequence[tuple[ScoringItem, Transcript]], /
    ) -> AsyncIterator[Score]:
        for item, transcript in reversed(work):
            outcome = self._outcome(item, transcript)
            yield score_of(item, transcript, outcome, self.function.info)

    def _outcome(self, item: ScoringItem, transcript: Transcript) -> RewardOutcome:
        if item.group_id in self.unavailable_groups:
            return unavailable("raised ValueError: no number")
        return outcome_of(self.function.call([transcript]))


def settings_of(folder: Path, **overrides: object) -> OfflineSettings:
    if not (folder / "model").exists():
        write_blank_model(folder / "model", hidden=16, layers=1)
        (folder / "model" / "chat_template.jinja").write_text(REFUSING)
        rows = [{"prompt": str(i), "ground_truth": "x"} for i in range(5)]
        (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table: dict[str, dict[str, object]] = {
        "run": {"name": "offline", "dir": str(folder), "model": str(folder / "model")},
        "data": {"file": str(folder / "prompts.jsonl"), "shuffle": False},
        "sampling": {"max_prompt_tokens": 8, "max_response_tokens": 8},
        "generators": {"device": "cpu", "max_sequences": 2},
    }
    table["run"]["group_size"] = 2
    for name, value in overrides.items():
        section, key = name.split("__")
        table.setdefault(section, {})[key] = value
    return offline_settings(table, folder / "a.trajectories", 0)


def generate(
    settings: OfflineSettings, engine: CannedEngine, scorer: InProcess | None = None
) -> int:
    """Do what ``generate`` does around the engine; return how many prompts it failed at."""
    generator = settings.generator
    sampler = Sampler(
        engine, TextCodec(generator.model, generator.sampling), sampling_by_item(generator), 4
    )
    source = load_training_prompts(generator.data, seed=generator.run.seed)
    answered = answered_positions(settings.out)
    writer = TrajectoryFileWriter(settings.out)
    settings.origin_file.write_text(json.dumps(settings.origin))
    scorer = scorer or InProcess()
    job = OfflineGeneration(settings, source, sampler, scorer, writer, answered, retry_after_s=0.0)

    async def run() -> int:
        failed = await job.run()
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1, "something still runs after the end"
        return failed

    try:
        return asyncio.run(run())
    finally:
        writer.close()


def positions(settings: OfflineSettings) -> list[int]:
    return [recorded.group.group_id for recorded in read_groups(settings.out)]


def test_an_engine_that_fails_twice_costs_its_prompt_and_another_start_fills_the_gap(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    settings = settings_of(tmp_path)
    with caplog.at_level(logging.INFO):
        assert generate(settings, Failing(2)) == 1
    assert "prompt 0 dropped: out of memory" in caplog.text
    assert "5 of 5 prompts, 1 dropped, 8 answers" in caplog.text
    assert positions(settings) == [1, 2, 3, 4]
    again = Failing(0)
    assert generate(settings_of(tmp_path), again) == 0
    assert positions(settings) == [1, 2, 3, 4, 0]
    assert len(again.asked) == 1, "a prompt was answered twice"


def test_keys_are_hidden_from_the_reward_function(tmp_path: Path):
    hidden: list[Path] = []

    async def start(_: object, *, hide: Sequence[Path] = ()) -> RewardPool:
        hidden.extend(hide)
        raise ConfigError("far enough")

    for broker in ({}, {"broker__keys": "/elsewhere/keys"}):
        settings = settings_of(tmp_path, run__key_file="/etc/generator.key", **broker)
        with pytest.raises(ConfigError, match="far enough"):
            asyncio.run(offline.generate(settings, "generator-1", start))
    key = Path("/etc/generator.key")
    assert hidden == [tmp_path / "keys", key, Path("/elsewhere/keys"), key]


def test_what_is_recorded_are_the_tokens_and_the_texts_of_each_answer(tmp_path: Path):
    settings = settings_of(tmp_path)
    assert generate(settings, Failing(0)) == 0
    for recorded in read_groups(settings.out):
        assert recorded.step == NOT_TRAINED
        assert len(recorded.payloads) == len(recorded.transcripts) == 2
        for payload, transcript in zip(recorded.payloads, recorded.transcripts, strict=True):
            token_ids = np.frombuffer(decode_payload(payload).token_ids.data, np.int32)
            assert token_ids[-2:].tolist() == completion(5, 2).token_ids
            assert decode_transcript(transcript).prompt.prompt == str(recorded.group.group_id)


def test_the_progress_counts_what_an_earlier_start_has_done(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    settings = settings_of(tmp_path)
    assert generate(settings, Failing(2)) == 1
    with caplog.at_level(logging.INFO):
        assert generate(settings_of(tmp_path), Failing(0)) == 0
    assert "4 prompts are in the file already" in caplog.text
    assert "5 of 5 prompts, 0 dropped, 2 answers" in caplog.text


def test_an_engine_that_fails_once_is_asked_again(tmp_path: Path):
    settings, engine = settings_of(tmp_path), Failing(1)
    assert generate(settings, engine) == 0
    assert positions(settings) == [0, 1, 2, 3, 4]
    assert engine.asked[0] == engine.asked[1], "the second attempt had other seeds"


def test_a_prompt_whose_answers_have_no_reward_is_left_out_with_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    settings = settings_of(tmp_path)
    with caplog.at_level(logging.INFO):
        assert generate(settings, Failing(0), InProcess(1, 3)) == 0
    assert "prompt 3 dropped: reward unavailable: raised ValueError: no number" in caplog.text
    assert positions(settings) == [0, 2, 4]


def test_a_file_of_other_settings_is_not_gone_on_with(tmp_path: Path):
    settings = settings_of(tmp_path)
    generate(settings, Failing(0))
    size = settings.out.stat().st_size
    with pytest.raises(
        ConfigError, match=r"was generated with sampling\.temperature = 1\.0, now it is 0\.5"
    ):
        settings_of(tmp_path, sampling__temperature=0.5)
    with pytest.raises(ConfigError, match=r"was generated with run\.seed = 0, now it is 9"):
        settings_of(tmp_path, run__seed=9)
    with pytest.raises(ConfigError, match=r"with reward\.options = None, now it is {'x': 1}"):
        settings_of(tmp_path, reward__options={"x": 1})
    settings_of(tmp_path, generators__max_sequences=8)
    settings.origin_file.unlink()
    with pytest.raises(ConfigError, match=r"a\.trajectories exists, and a\.trajectories\.json"):
        settings_of(tmp_path)
    assert settings.out.stat().st_size == size


@pytest.mark.parametrize("on_bad_row", ["skip", "error"])
def test_a_row_that_the_template_refuses_is_skipped_or_ends_it(tmp_path: Path, on_bad_row: str):
    settings = settings_of(tmp_path, data__as_chat=True, data__on_bad_row=on_bad_row)
    if on_bad_row == "skip":
        assert generate(settings, Failing(0)) == 0
        assert positions(settings) == [0, 1, 2, 4]
        return
    with pytest.RaisesGroup(
        pytest.RaisesExc(ConfigError, match=r"row 3 of default: the chat template refuses it: no 3")
    ):
        generate(settings, Failing(0))


class CuttingOff(Failing):
    """Ends the answers to its second prompt at the length limit."""

    async def sample(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        count: int,
        seeds: Sequence[int] = (),
    ) -> list[Completion]:
        answers = await super().sample(prompt_ids, params, count=count, seeds=seeds)
        is_second = len(self.asked) == 2
        return [replace(one, finish_reason="length") for one in answers] if is_second else answers


@pytest.mark.parametrize(("overlong", "kept"), [("keep", [0, 1, 2, 3, 4]), ("drop", [0, 2, 3, 4])])
def test_answers_that_were_cut_off_cost_their_prompt_where_asked_for(
    tmp_path: Path, overlong: str, kept: list[int], caplog: pytest.LogCaptureFixture
):
    settings = settings_of(
        tmp_path, sampling__overlong_responses=overlong, generators__max_sequences=2
    )
    with caplog.at_level(logging.INFO):
        assert generate(settings, CuttingOff(0)) == 0
    assert positions(settings) == kept
    warning = "prompt 1 dropped: 2 responses were cut off (sampling.overlong_responses)"
    assert (warning in caplog.text) == (overlong == "drop")
