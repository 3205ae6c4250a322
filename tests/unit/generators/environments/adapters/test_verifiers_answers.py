import pytest

from slipstream.generators.environments.adapters.verifiers import answer_of, command, row_of


@pytest.mark.parametrize("line", [b"", b"no", b"[]", b"{}"])
def test_an_answer_is_an_object_with_a_kind(line: bytes):
    with pytest.raises(ValueError, match=r"answer|Expecting"):
        answer_of(line)
    assert answer_of(b'{"kind": "ready"}\n') == {"kind": "ready"}


def test_a_task_becomes_a_row_that_carries_it():
    task = {"kind": "task", "task": {"idx": 0}, "prompt": "x", "system_prompt": None}
    extra = {"verifiers_task": {"idx": 0}}
    user = {"role": "user", "content": "x"}
    assert row_of(task) == {"prompt": [user], "extra_info": extra}
    system = {"role": "system", "content": "be"}
    assert row_of({**task, "system_prompt": "be"})["prompt"] == [system, user]


def test_the_runner_sees_neither_our_modules_nor_our_variables():
    assert command("py")[:2] == ["py", "-I"]
