"""What is logged about reward functions that fail, and how often."""

from slipstream.broker.report.reward_trouble import RewardTrouble


def test_a_function_that_fails_often_is_named_with_numbers_and_the_reason():
    trouble = RewardTrouble()
    for i in range(40):
        trouble.scored("f.py:good")
        if i % 4 == 0:
            trouble.failed("f.py:bad", f"took longer than {i}")
        else:
            trouble.scored("f.py:bad")
    text = "10 of the last 40 tries of f.py:bad gave no reward: took longer than 36"
    assert trouble.summary() == text


def test_a_few_failures_are_no_trouble_and_what_is_mended_is_forgotten():
    trouble = RewardTrouble()
    for _ in range(4):
        assert trouble.failed("f", "judge is down") == ""
    assert trouble.summary() == ""
    assert trouble.failed("f", "judge is down") != ""
    for _ in range(50):
        trouble.scored("f")
    assert trouble.summary() == ""


def test_warnings_double_and_functions_are_bounded():
    trouble = RewardTrouble()
    warned = [i for i in range(1, 1_001) if trouble.failed("f", "no")]
    assert warned == [5, 10, 20, 40, 80, 160, 320, 640]
    for i in range(1_000):
        trouble.scored(f"f{i}")
    assert len(trouble._tries) == 100
