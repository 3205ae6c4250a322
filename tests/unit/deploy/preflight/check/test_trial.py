from pathlib import Path

import pytest

from slipstream.deploy.config import RunConfig, run_config
from slipstream.deploy.predict.laws.shapes import shape_folder
from slipstream.deploy.preflight.check.facts import Fact
from slipstream.deploy.preflight.check.trial import judge_readings, observe_data
from slipstream.wire.messages.trajectory import Prompt
from slipstream.wire.settings.load import load_table

ROOT = Path(__file__).parents[5]
READ = Prompt(prompt="1+1=", ground_truth="2", row=0)
UNREAD = Prompt(prompt="1+1=", row=1)
ACTS = "environment.function=mine:Game"


def config_of(*words: str) -> RunConfig:
    model = f"run.model={shape_folder('Qwen3-30B-A3B')}"
    words = (model, "generators.siblings_together=false", *words)
    return run_config(load_table(ROOT / "configs" / "quickstart.toml", words))


def judged(prompts: list[Prompt], *words: str) -> list[Fact]:
    return judge_readings(config_of(*words), prompts)


@pytest.mark.parametrize(
    ("prompts", "words", "outcomes"),
    [
        ([READ], (), []),
        ([UNREAD], (), ["fail"]),
        ([READ, UNREAD], (), ["warn"]),
        ([UNREAD], (ACTS,), ["warn"]),
        ([UNREAD], (ACTS, "reward.workers=0"), []),
        ([UNREAD], ("reward.function=slipstream.broker.rewards.no:score",), ["warn"]),
        ([READ], ("reward.options={exakt = true}",), ["fail"]),
        ([UNREAD], ("reward.function=slipstream.broker.rewards.lengths:linear",), []),
        ([UNREAD], ("reward.function=mine.py:score",), []),
    ],
)
def test_rows_that_no_reward_reads_are_judged_by_their_number(
    prompts: list[Prompt], words: tuple[str, ...], outcomes: list[str]
):
    assert [fact.outcome for fact in judged(prompts, *words)] == outcomes


def test_the_first_row_that_is_not_read_is_named_with_the_reason():
    (fact,) = judged([READ, UNREAD, UNREAD])
    assert fact.line == (
        "warn data: 2 of 3 rows: no ground truth that exact_match:score reads, row 1: the row has "
        "no ground_truth (data.ground_truth_column) (reward.function)"
    )


def test_the_rows_that_are_read_are_counted_meanwhile(capsys: pytest.CaptureFixture[str]):
    assert judged([READ] * 1001) == []
    told = capsys.readouterr().err.splitlines()
    assert told == [f"# looking at the data: row {n} of 1,001" for n in ("0", "1,000")]


def test_a_prompt_that_ends_with_the_policys_own_turn_is_named(tmp_path: Path):
    file = tmp_path / "a.jsonl"
    turns = '{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}'
    file.write_text(f'{{"prompt": [{turns}], "ground_truth": "4"}}\n')
    words = [f"data.file={file}", "eval.file="]
    facts = [fact.line for fact in observe_data(config_of(*words)) if fact.outcome != "ok"]
    assert facts == [
        "warn data: 1 of 1 prompts end with a turn of the policy's own (assistant): the answer may "
        "stand in it"
    ]
