"""What the benchmark of the engine compares."""

from benchmarks.bars import Bars
from benchmarks.bench_engine import CASES, Turn, prompts, report


def test_prompts_are_as_long_as_said_and_new_in_each_round():
    case = CASES["0.8M"]
    asked = prompts(case, 1)
    assert {len(ids) for ids in asked} == {case.prompt_tokens}
    assert len(asked) == case.sequences
    assert asked == prompts(case, 1)
    assert asked[0] != prompts(case, 2)[0]


def test_the_bar_is_a_share_of_medians():
    lines = list[str]()
    turns = {
        "engine": [Turn(4.0, 2.0), Turn(9.0, 9.0), Turn(1.0, 1.0)],
        "transformers": [Turn(3.0, 1.0)],
    }
    text = report(Bars(lines.append), "0.8M", turns)
    assert text.splitlines()[2:] == [
        "| engine | 3 | 4.00 | 2.00 | 2048 |",
        "| transformers | 1 | 3.00 | 1.00 | 4096 |",
    ]
    (bar,) = lines
    assert bar.startswith("bar engine_0.8M: 0.500 of transformers' tokens per CPU s")
