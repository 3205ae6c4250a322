"""A teacher behind an endpoint that answers as scripted (a real one: test_sglang_server.py)."""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp import web

from slipstream.algos.choice import TeacherOptions
from slipstream.learner.batches.packing import PackedBatch, TrainTrajectory, pack
from slipstream.learner.parallel import ParallelSizes
from slipstream.learner.training.teacher import EndpointTeacher
from slipstream.wire.errors import ConfigError, EngineError, PeerLostError
from slipstream.wire.files.keys import write_private

pytestmark = pytest.mark.integration
VOCAB_SIZE = 20  # of the tiny policy
ALONE = SimpleNamespace(world_size=1, sizes=ParallelSizes(), leads_replica=True)
KEY = "teacher-key-0815"


def token_sequences() -> list[list[int]]:
    """Return sequences of unlike lengths, of any tokens."""
    random = np.random.default_rng(0)
    return [random.integers(0, VOCAB_SIZE, length).tolist() for length in (30, 3, 17, 2, 41)]


def train_sequences() -> list[TrainTrajectory]:
    """Return them with prompts of a third of each, and a hole in one."""
    result = []
    for number, tokens in enumerate(token_sequences()):
        mask = np.arange(len(tokens)) >= max(1, len(tokens) // 3)
        if number == 0:
            mask[len(tokens) // 2] = False
        result.append(
            TrainTrajectory(
                token_ids=np.array(tokens, np.int32),
                loss_mask=mask,
                behavior_logprobs=np.zeros(len(tokens), np.float32),
                temperature=1.0,
            )
        )
    return result


def batches() -> list[PackedBatch]:
    everything, cpu = train_sequences(), torch.device("cpu")
    return [pack(everything[:2], cpu), pack(everything[2:], cpu)]


def teacher(url: str, *, timeout_s: float = 60.0, **options: Any) -> EndpointTeacher:  # noqa: ANN401 as TeacherOptions
    return EndpointTeacher(
        TeacherOptions(coefficient=1.0, endpoint=url, **options),
        ALONE,  # type: ignore[arg-type]  # what it reads of a topology
        vocab_size=VOCAB_SIZE,
        timeout_s=timeout_s,
    )


Answer = Callable[[dict[str, Any]], tuple[int, Any]]


@contextmanager
def server_of(answer: Answer) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield the URL of a server, in a thread of its own, and the questions that it was asked."""
    asked: list[dict[str, Any]] = []
    loop = asyncio.new_event_loop()

    async def handler(request: web.Request) -> web.Response:
        question = await request.json()
        asked.append({**question, "authorization": request.headers.get("Authorization")})
        status, body = answer(question)
        return web.json_response(body, status=status)

    async def begin() -> tuple[web.AppRunner, int]:
        app = web.Application()
        app.router.add_post("/generate", handler)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner, int(runner.addresses[0][1])

    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    runner, port = asyncio.run_coroutine_threadsafe(begin(), loop).result()
    try:
        yield f"http://127.0.0.1:{port}", asked
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def logprob_of(token: int) -> float:
    return -0.01 * (token + 1)


def truth(question: dict[str, Any]) -> tuple[int, Any]:
    first = question["logprob_start_len"]
    given_back = [[logprob_of(token), token, None] for token in question["input_ids"][first:]]
    given_back[0][0] = None  # nothing chose the first
    return 200, {"text": "", "meta_info": {"input_token_logprobs": given_back}}


def test_teacher_logprobs_are_at_their_tokens_and_the_key_is_sent(tmp_path: Path):
    write_private(tmp_path / "key", KEY + "\n")
    with server_of(truth) as (url, asked):
        found = teacher(url + "/", api_key_file=str(tmp_path / "key")).logprobs(batches())
    for batch, values in zip(batches(), found, strict=True):
        expected = torch.where(batch.loss_mask, -0.01 * (batch.token_ids + 1), 0.0)
        assert torch.allclose(values, expected)
    assert len(asked) == 1 + len(train_sequences())
    assert {one["authorization"] for one in asked} == {f"Bearer {KEY}"}
    assert all(one["sampling_params"] == {"max_new_tokens": 0, "temperature": 1.0} for one in asked)
    starts = {len(one["input_ids"]): one["logprob_start_len"] for one in asked[1:]}
    assert starts == {n: max(1, n // 3) - 1 for n in map(len, token_sequences())}


def test_a_server_that_is_away_for_a_while_is_asked_again():
    failures = 3

    def sometimes(question: dict[str, Any]) -> tuple[int, Any]:
        nonlocal failures
        if failures and len(question["input_ids"]) > 2:
            failures -= 1
            return 503, {"error": "busy"}
        return truth(question)

    with server_of(sometimes) as (url, asked):
        found = teacher(url).logprobs(batches())
    assert failures == 0
    assert len(asked) == 1 + len(train_sequences()) + 3
    assert all(
        (values[batch.loss_mask] < 0).all() for values, batch in zip(found, batches(), strict=True)
    )


def test_unreachable_teacher_is_reported_with_its_setting():
    with server_of(truth) as (url, _):
        pass
    with pytest.raises(
        PeerLostError,
        match=rf"the teacher at {url}/generate \(algo.teacher.endpoint\) did not answer for 0.5 s",
    ):
        teacher(url, timeout_s=0.5)


def others(question: dict[str, Any]) -> tuple[int, Any]:
    status, body = truth(question)
    for entry in body["meta_info"]["input_token_logprobs"]:
        entry[1] += 1
    return status, body


def cut(question: dict[str, Any]) -> tuple[int, Any]:
    status, body = truth(question)
    del body["meta_info"]["input_token_logprobs"][2:]
    return status, body


def above_0(question: dict[str, Any]) -> tuple[int, Any]:
    status, body = truth(question)
    body["meta_info"]["input_token_logprobs"][-1][0] = 0.5
    return status, body


def far_below_0(question: dict[str, Any]) -> tuple[int, Any]:
    status, body = truth(question)
    body["meta_info"]["input_token_logprobs"][-1][0] = -1e300  # -inf in float32
    return status, body


WRONG: dict[str, tuple[Answer, str]] = {
    "other tokens": (others, "was asked about .* tokens and answered about others"),
    "cut": (cut, "was asked about .* tokens and answered about others"),
    "above 0": (above_0, "answered with a log-probability of 0.5"),
    "far below 0": (far_below_0, r"answered with a log-probability of -1e\+300"),
    "no numbers": (lambda _: (200, {"meta_info": {}}), "answered about others"),
    "something else": (lambda _: (200, {"choices": []}), "the teacher's reply .* cannot be read"),
    "refused": (lambda _: (400, {"error": "too long"}), "answered HTTP 400: .*too long"),
    "elsewhere": (lambda _: (302, {}), "answered HTTP 302"),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_answer_that_makes_no_sense_is_an_error(name: str):
    answer, message = WRONG[name]

    def later(question: dict[str, Any]) -> tuple[int, Any]:
        return (truth if len(question["input_ids"]) == 2 else answer)(question)

    with server_of(later) as (url, _):
        asked = teacher(url)
        with pytest.raises(EngineError, match=message):
            asked.logprobs(batches())


@pytest.mark.parametrize(
    "url",
    [
        *("10.0.0.7:30000", "http://", "http://me:secret@host:1", "http://me:secret@host:port"),
        *("http://[::1", "http://host:99999999", "http://host:0", "http://a..b"),
        *("http://a host:1", " http://host:1", "http://host:1/?secret=1", "http://host:1/#secret"),
    ],
)
def test_an_address_that_is_none_is_refused(url: str):
    with pytest.raises(ConfigError, match=r"algo.teacher.endpoint (must be|is no)") as refused:
        teacher(url)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("text", ["", "\n", "two\nlines", "nul\0"])
def test_a_key_that_is_none_is_refused(tmp_path: Path, text: str):
    write_private(tmp_path / "key", text)
    with (
        server_of(truth) as (url, asked),
        pytest.raises(ConfigError, match=r"key \(algo.teacher.api_key_file\) holds no line that"),
    ):
        teacher(url, api_key_file=str(tmp_path / "key"))
    assert not asked


def test_a_key_that_the_server_repeats_is_not_shown(tmp_path: Path):
    write_private(tmp_path / "key", KEY + "\n")
    repeated = {"you sent": {"Authorization": f"Bearer {KEY}"}}
    with (
        server_of(lambda _: (400, repeated)) as (url, asked),
        pytest.raises(ConfigError, match=r"HTTP 400: .*Bearer \(key\)") as refused,
    ):
        teacher(url, api_key_file=str(tmp_path / "key"))
    assert asked[0]["authorization"] == f"Bearer {KEY}"
    assert KEY not in str(refused.value)


def test_what_is_no_http_is_shown_in_a_line_without_the_key(tmp_path: Path):
    write_private(tmp_path / "key", KEY + "\n")
    with socket.create_server(("127.0.0.1", 0)) as server:

        def repeat_it() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return  # closed
                with connection:
                    connection.recv(65536)
                    connection.sendall(f"Bearer {KEY}\r\n\r\n".encode())

        thread = threading.Thread(target=repeat_it)
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        try:
            with pytest.raises(PeerLostError, match=r"did not answer .*Bearer \(key\)") as lost:
                teacher(url, timeout_s=0.5, api_key_file=str(tmp_path / "key"))
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
    assert KEY not in str(lost.value)
    assert "\n" not in str(lost.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0.7}, "these answers were sampled at 0.7"),
        (
            {"end_barred": np.ones(30, np.bool_), "end_token_ids": (5,)},
            "not allowed to end at first",
        ),
    ],
)
def test_tokens_of_another_distribution_are_refused(changes: dict[str, Any], message: str):
    first = replace(train_sequences()[0], **changes)
    with server_of(truth) as (url, _):
        asked = teacher(url)
        with pytest.raises(ConfigError, match=message):
            asked.logprobs([pack([first], torch.device("cpu"))])
