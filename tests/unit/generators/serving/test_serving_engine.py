"""What SGLang is asked for a sample, and what is made of its answers."""

from typing import Any

import numpy as np
import pytest

from slipstream.generators.serving.engine import question_of, sampled_of, seed_of
from slipstream.wire.errors import EngineError
from slipstream.wire.messages.commands import Sample


def sample(**changed: object) -> Sample:
    fields: dict[str, Any] = {
        "version": "ab",
        "tokens": np.array([3, 4], "<i4").tobytes(),
        "count": 2,
        "max_tokens": 5,
        "seed": 7,
    }
    return Sample(**(fields | changed))


def test_every_answer_has_a_seed_of_its_own_and_the_version():
    body = question_of(sample(stop=("x",), stop_ids=(9,), top_k=4))
    assert body["input_ids"] == [[3, 4], [3, 4]]
    assert body["lora_path"] == "ab"
    first, second = body["sampling_params"]
    assert (first["sampling_seed"], second["sampling_seed"]) == (seed_of(7, 0), seed_of(7, 1))
    assert (first["stop"], first["stop_token_ids"], first["top_k"]) == (["x"], [9], 4)
    assert body["logprob_start_len"] == [-1, -1], "prompts come from the cache"
    assert "lora_path" not in question_of(sample(version=""))


def test_the_prompt_is_scored_once():
    body = question_of(sample(prompt_logprobs=True, prompt_top=3, sample_top=1))
    assert body["logprob_start_len"] == [0, -1]
    assert body["top_logprobs_num"] == [3, 1]


def answer(ids: list[int], **info: object) -> dict[str, Any]:
    said: dict[str, Any] = {
        "finish_reason": {"type": "stop"},
        "output_token_logprobs": [[-0.5, token, None] for token in ids],
        "cached_tokens": 1,
    }
    return {"output_ids": ids, "meta_info": said | info}


def test_answers_are_read():
    tops = [[[-0.5, 6, None], [-1.5, 7, None]], None]
    info = {
        "input_token_logprobs": [[None, 3, None], [-0.25, 4, None]],
        "input_top_logprobs": [None, [[-0.25, 4, None]]],
        "output_top_logprobs": tops,
    }
    asked = sample(prompt_logprobs=True, prompt_top=2, sample_top=1)
    found = sampled_of([answer([6, 8], **info), answer([5, 8], output_top_logprobs=tops)], asked)
    assert found.version == "ab"
    assert np.frombuffer(found.answers[0].tokens, "<i4").tolist() == [6, 8]
    assert found.prompt_logprobs is not None
    prompt = np.frombuffer(found.prompt_logprobs, "<f4")
    assert np.isnan(prompt[0])
    assert prompt[1] == -0.25
    assert found.prompt_top is not None
    assert np.frombuffer(found.prompt_top.ids, "<i4").tolist() == [-1, -1, 4, -1]
    top = found.answers[0].top
    assert top is not None
    assert np.frombuffer(top.ids, "<i4").tolist() == [6, -1]


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ([answer([6], finish_reason={"type": "abort"})], "ended with"),
        ([{"output_ids": [1], "meta_info": answer([2])["meta_info"]}], "of other tokens"),
        ([{"output_ids": [1]}], "unexpected answer"),
    ],
)
def test_a_malformed_answer_is_an_error(answers: list[dict[str, Any]], message: str):
    with pytest.raises(EngineError, match=message):
        sampled_of(answers, sample(count=1))
