"""A running SGLang server as our engine, over its HTTP control (sglang 0.5.23).

SGLang answers "success" to unknown tensor names and to missing ones, and it relabels on every
update: the caller checks the tensor set before and the checksums after, and sets the label last.
SGLang answers a pause before its scheduler has paused. But the scheduler carries out commands in
the order of sending, so no token gets a label that was set after it was chosen.
"""

import asyncio
import base64
import logging
import math
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import aiohttp
import msgspec
import numpy as np
from numpy.typing import NDArray

from slipstream.generators.engine import (
    Completion,
    EngineLoad,
    ExpertLayers,
    PromptImage,
    SamplingParams,
    Scores,
)
from slipstream.generators.sglang.adoption import (
    ALL_STEPS,
    STAGE_STEPS,
    STAGED_STEPS,
    AdoptionAnswer,
    AdoptionOrder,
    Step,
)
from slipstream.generators.versions.version_runs import version_starts
from slipstream.weightbus.agent.engine import Adoption
from slipstream.wire.errors import EngineError, EngineRefusedError
from slipstream.wire.messages.manifest import Bucket
from slipstream.wire.messages.trajectory import Json
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.models.families.registry import checksum_name
from slipstream.wire.unreadable import UNREADABLE

_log = logging.getLogger(__name__)
_ALL = -1  # top_k without a limit
_LOADS = "/v1/loads?include=core,queues"
_FROM_DISK = "/update_weights_from_disk"
_NONE = Path()
_FIRST_WAIT_S = 0.001  # until the next question for a version that is being staged
_LONGEST_WAIT_S = 0.1
_PARSE = "/parse_function_call"
_REASONING = "/separate_reasoning"
KEPT_S = 2.0  # time for an idle connection, well below the server's


class _ParsedCall(msgspec.Struct, frozen=True):
    """A tool call that SGLang's parser found."""

    name: str | None
    parameters: str  # JSON


class _Separated(msgspec.Struct):
    """SGLang's answer: a reply and its thought, separated."""

    reasoning_text: str | None
    text: str | None


class _Parsed(msgspec.Struct, frozen=True):
    """The answer of SGLang's parser of tool calls."""

    normal_text: str
    calls: tuple[_ParsedCall, ...]


def load_of(groups: Sequence[Mapping[str, Any]]) -> EngineLoad:
    """Return the load of a server from its attention groups, each with a cache of its own.

    Raises:
        ValueError: there is no group.
        KeyError: a group lacks a figure.
    """
    if not groups:
        raise ValueError("no load")

    def total(name: str) -> int:
        return sum(load[name] for load in groups)

    return EngineLoad(
        num_running=total("num_running_reqs"),
        num_waiting=total("num_waiting_reqs"),
        used_tokens=total("num_used_tokens"),
        capacity_tokens=total("max_total_num_tokens"),
        num_retractions=sum(load.get("queues", {}).get("retracted", 0) for load in groups),
    )


class SglangEngine:
    """HTTP client of one server. Use it inside one event loop, as a context manager."""

    def __init__(
        self,
        url: str,
        api_key: str,
        *,
        request_timeout_s: float,
        control_timeout_s: float,
        load_timeout_s: float | None = None,
        in_flight: Literal["retract", "in_place"] = "retract",
        keeps_sessions: bool = True,
        num_ranks: int = 1,
        kept_s: float = KEPT_S,
    ) -> None:
        """Connect to a server.

        ``control_timeout_s`` limits a command, ``load_timeout_s`` the load of a whole version; with
        None both limits are equal. ``in_flight`` is the effect of a pause on unfinished responses
        (weightbus.in_flight); with in_place the server must cache no prefixes. With
        ``keeps_sessions`` it must have a session cache, which learns of ends. The server's tensors
        are split over ``num_ranks``. A connection that is idle for ``kept_s`` is closed.
        """
        self._num_ranks = num_ranks
        self._url = url
        self._in_flight = in_flight
        self._keeps_sessions = keeps_sessions
        self._http = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {api_key}"},
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=kept_s),
        )
        self._request_timeout = aiohttp.ClientTimeout(request_timeout_s)
        self._control_timeout = aiohttp.ClientTimeout(control_timeout_s)
        self._load_timeout = aiohttp.ClientTimeout(load_timeout_s or control_timeout_s)
        self._num_in_flight = 0
        self._has_shadow = True  # until it says that it has none
        self._staged: PolicyVersion | None = None  # version in the shadow
        self._ending = set[asyncio.Task[None]]()  # sessions

    async def close(self) -> None:
        """Close the connections, which also ends generations over them."""
        for ending in self._ending:
            ending.cancel()
        await asyncio.gather(*self._ending, return_exceptions=True)
        await self._http.close()

    # ---- sampling ------------------------------------------------------------

    async def sample(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        count: int,
        seeds: Sequence[int] = (),
    ) -> list[Completion]:
        """Return ``count`` independent responses; raises EngineError without an answer."""
        body = self._question(prompt_ids, params, count=count, seeds=seeds)
        answers = await self._answers(body, count)
        return [completion_of(answer, params, len(prompt_ids)) for answer in answers]

    def _question(
        self, prompt_ids: list[int], params: SamplingParams, *, count: int, seeds: Sequence[int]
    ) -> dict[str, Any]:
        """Return the body of a request for responses."""
        sampling: dict[str, Any] = {
            "temperature": params.temperature,
            "max_new_tokens": params.max_new_tokens,
            "min_new_tokens": params.min_new_tokens,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "min_p": params.min_p,
        }
        if params.max_kept:  # SGLang returns kept tokens only if their number is bounded
            most = params.max_kept
            sampling["top_k"] = most if params.top_k == _ALL else min(params.top_k, most)
        if params.stop:
            sampling["stop"] = params.stop
        if params.stop_token_ids:
            sampling["stop_token_ids"] = params.stop_token_ids
        return {
            "input_ids": [prompt_ids] * count,
            "sampling_params": [{**sampling, "sampling_seed": seed} for seed in seeds] or sampling,
            "return_logprob": True,
            "return_sampling_mask": params.max_kept > 0,
            "return_routed_experts": params.experts_of is not None,
            "routed_experts_start_len": params.experts_from,
            "session_id": params.session or None,  # SGLang opens it by itself
            **image_data([params.images] * count),
        }

    async def _answers(self, body: dict[str, Any], count: int) -> list[dict[str, Any]]:
        self._num_in_flight += count
        try:
            answers = await self._request("POST", "/generate", body, self._request_timeout)
        finally:
            self._num_in_flight -= count
        if not isinstance(answers, list) or len(answers) != count:
            raise EngineError(f"SGLang /generate: {count} answers asked, got {str(answers)[:200]}")
        return answers

    def end_session(self, session: str) -> None:
        """Have the server evict a session's prefixes before those of others; waits for nothing."""
        if not self._keeps_sessions:
            return
        ending = asyncio.create_task(self._end_session(session))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    async def _end_session(self, session: str) -> None:
        try:
            await self._control("/close_session", {"session_id": session})
        except EngineError as error:  # its prefixes go with the next version
            _log.info("%s", error)

    async def score(self, sequences: Sequence[Sequence[int]], *, num_context: int) -> Scores:
        """Return the logprobs of tokens after the first ``num_context`` of each sequence.

        This is a request like any other: cached prefixes of the context, whatever their version,
        are used for the tokens after it. Raises EngineError without an answer.
        """
        answers = await self._scores(self._scoring(sequences, num_context))
        return scores_of(answers, sequences, num_context)

    def _scoring(self, sequences: Sequence[Sequence[int]], num_context: int) -> dict[str, Any]:
        """Return the body of a request for logprobs.

        SGLang uses the cache only for tokens before the first token with a requested logprob. It
        gives that token no logprob, which would need the output at the token before.
        """
        return {
            "input_ids": [list(tokens) for tokens in sequences],
            "sampling_params": {"temperature": 1.0, "max_new_tokens": 1},
            "return_logprob": True,
            "logprob_start_len": num_context - 1,
        }

    async def _scores(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Return answers; they do not count as in flight, because no caller waits for tokens."""
        answers = await self._request("POST", "/generate", body, self._load_timeout)
        count = len(body["input_ids"])
        if not isinstance(answers, list) or len(answers) != count:
            raise EngineError(f"SGLang /generate: {count} scores asked, got {str(answers)[:200]}")
        return answers

    async def tool_calls(
        self, text: str, tools: Sequence[Json], parser: str
    ) -> tuple[str, list[dict[str, Json]], int]:
        """Return a reply's text without tool calls, the calls in OpenAI's form, and unread calls.

        The server loses no character (``tool_calls``) and forwards unknown names. Calls that it
        cannot read come without a name; only their number is returned.

        Raises:
            EngineRefusedError: there is no such parser, or it cannot read this text.
            EngineError: there is no answer.
        """
        body = {"text": text, "tools": list(tools), "tool_call_parser": parser}
        answer = await self._request("POST", _PARSE, body, self._control_timeout)
        try:
            found = msgspec.convert(answer, _Parsed)
        except msgspec.ValidationError as error:
            raise EngineError(f"SGLang {_PARSE}: unexpected answer, {error}") from error
        calls: list[dict[str, Json]] = [
            {
                "id": secrets.token_hex(5)[1:],  # nine characters, for Mistral's templates
                "type": "function",
                "function": {"name": call.name, "arguments": call.parameters},
            }
            for call in found.calls
            if call.name
        ]
        return found.normal_text, calls, len(found.calls) - len(calls)

    async def separate_reasoning(self, text: str, parser: str) -> tuple[str, str]:
        """Return the thought at the beginning of a reply, and the rest of the reply.

        Raises:
            EngineRefusedError: there is no such parser, or it cannot read this text.
            EngineError: there is no answer.
        """
        body = {"text": text, "reasoning_parser": parser}
        answer = await self._request("POST", _REASONING, body, self._control_timeout)
        try:
            found = msgspec.convert(answer, _Separated)
        except msgspec.ValidationError as error:
            raise EngineError(f"SGLang {_REASONING}: unexpected answer, {error}") from error
        return found.reasoning_text or "", found.text or ""

    async def load(self) -> EngineLoad:
        """Return the server's load at its last batch; the server answers while paused.

        ``queues.retracted`` counts since the server's start, by a patch (``sglang/patches.py``).
        """
        answer = await self._request("GET", _LOADS, None, self._control_timeout)
        try:
            return load_of(answer["loads"] if isinstance(answer, dict) else answer)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise EngineError(f"SGLang {_LOADS}: unexpected answer, {error!r}") from error

    # ---- weights -------------------------------------------------------------

    async def open_group(
        self, *, host: str, port: int, group_name: str, rank: int, world_size: int, backend: str
    ) -> None:
        """Join a process group with this engine's first rank as ``rank``; returns once joined."""
        await self._control(
            "/init_weights_update_group",
            {
                "master_address": host,
                "master_port": port,
                "rank_offset": rank,
                "world_size": world_size,
                "group_name": group_name,
                "backend": backend,
            },
        )

    async def close_group(self, group_name: str) -> None:
        """Leave a group and end an update that a failure left open; never fails."""
        calls: list[tuple[str, dict[str, Any]]] = [("/end_weight_update", {})]
        if group_name:
            calls.append(("/destroy_weights_update_group", {"group_name": group_name}))
        for path, body in calls:
            try:
                await self._control(path, body)
            except EngineError as error:  # example: no update was open
                _log.info("%s", error)

    async def begin_update(self) -> None:
        """Open an update."""
        await self._control("/begin_weight_update", {})

    async def load_bucket(self, bucket: Bucket, *, group_name: str, last: bool) -> None:
        """Receive one bucket over the group; ``last`` also forgets cached prefixes."""
        await self._control(
            "/update_weights_from_distributed",
            {
                "names": [tensor.name for tensor in bucket.tensors],
                "dtypes": [tensor.dtype for tensor in bucket.tensors],
                "shapes": [tensor.shape for tensor in bucket.tensors],
                "group_name": group_name,
                "load_format": "flattened_bucket",
                "flush_cache": last and self._forgets_prefixes,
                "weight_version": None,
            },
        )

    async def end_update(self) -> None:
        """Close an update."""
        await self._control("/end_weight_update", {})

    @property
    def _forgets_prefixes(self) -> bool:
        """True if an update flushes the prefix cache; with in_place it does not.

        With in_place there is no prefix cache. SGLang also refuses to flush while responses in
        flight keep their keys and values, and then answers that the update failed.
        """
        return self._in_flight == "retract"

    async def checksums(self) -> dict[str, str]:
        """Return the checksum of every tensor on every rank, by ``checksum_name``.

        Raises:
            EngineError: the server has more or fewer ranks than it was started with.
        """
        answer = await self._control("/weights_checker", {"action": "checksum"})
        ranks = {
            rank["parallelism_info"][0]["tp_rank"]: rank["checksums"] for rank in answer["ranks"]
        }
        if sorted(ranks) != list(range(self._num_ranks)):
            raise EngineError(
                f"SGLang /weights_checker: ranks {sorted(ranks)} answered, it has {self._num_ranks}"
            )
        return {
            checksum_name(name, rank): checksum
            for rank, checksums in ranks.items()
            for name, checksum in checksums.items()
        }

    async def stage_folder(self, folder: Path, version: PolicyVersion) -> Mapping[str, float]:
        """Load a folder next to the live weights while the server generates.

        Returns:
            Seconds by phase; empty if the server has no memory for a second copy.

        Raises:
            EngineError: it could not be loaded, or not in time; the server generates as before.
        """
        deadline_s = time.monotonic() + (self._load_timeout.total or math.inf)
        wait_s = _FIRST_WAIT_S
        self._staged = None
        while self._has_shadow:
            answer = await self._ordered(STAGE_STEPS, version.label, folder=folder)
            if answer.staged == "ready":
                self._staged = version
                return answer.phase_seconds
            if answer.staged == "no shadow":
                self._has_shadow = False
                break
            if time.monotonic() > deadline_s:
                raise EngineError(f"{version.label} is still being loaded into the shadow")
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
        return {}

    async def adopt_folder(self, folder: Path, version: PolicyVersion, *, digest: str) -> Adoption:
        """Pause, load a folder, compare, label and resume, in one call to the scheduler.

        A version that is staged is compared first, and then copied on the device. The folder needs
        no config.json, and with one file no index; the file may be a link to memory. Without a
        digest nothing is compared. Patched (``sglang/patches.py``), SGLang reports a failed load
        and continues.

        Raises:
            EngineError: a step failed; the server may hold a mixture, and is paused then.
        """
        num_in_flight = self._num_in_flight
        is_staged = self._staged == version
        self._staged = None  # if a step fails
        steps = STAGED_STEPS if is_staged else ALL_STEPS
        answer = await self._ordered(steps, version.label, digest=digest, folder=folder)
        is_paused = bool(answer.differing) and not is_staged
        return Adoption(num_in_flight, answer.phase_seconds, answer.differing, is_paused)

    async def pause_for_update(self) -> int:
        """Stop generating and open an update; return how many generations are in flight.

        They are counted here, because SGLang has no count; waiting ones are included. retract gives
        up their keys and values, which the engine computes again when it resumes. in_place keeps
        them: the tokens that follow attend to keys and values of the old weights, and so does a
        half-computed prompt.
        """
        num_in_flight = self._num_in_flight
        await self._ordered(("pause", "begin"))
        return num_in_flight

    async def finish_update(self, version: PolicyVersion, *, digest: str) -> dict[str, str]:
        """Close an update, compare, label and resume, in one call to the scheduler.

        Returns:
            The checksums of the server, which stays paused, if they have another digest.
        """
        steps: tuple[Step, ...] = ("end", "check", "label", "resume")
        return (await self._ordered(steps, version.label, digest=digest)).differing

    async def _ordered(
        self, steps: tuple[Step, ...], version: str = "", *, digest: str = "", folder: Path = _NONE
    ) -> AdoptionAnswer:
        order = AdoptionOrder(
            steps=steps,
            version=version,
            pause=self._in_flight,
            digest=digest,
            num_ranks=self._num_ranks,
        )
        answer = await self._control(
            _FROM_DISK,
            {
                "model_path": str(folder),
                "load_format": "safetensors",
                "flush_cache": self._forgets_prefixes,
                "manifest": msgspec.to_builtins(order),
            },
            self._load_timeout,
        )
        done = AdoptionAnswer.read(str(answer.get("message", "")))
        if (done.steps, done.version) != (steps, version):  # answer to an abandoned order
            raise EngineError(f"SGLang {_FROM_DISK}: answered for {done.steps} of {done.version}")
        return done

    async def label(self, version: PolicyVersion) -> None:
        """Report tokens chosen from now on as chosen by ``version``; call it before ``resume``."""
        body = {"new_version": version.label, "abort_all_requests": False}
        await self._control("/update_weight_version", body)

    async def resume(self) -> None:
        """Generate again."""
        await self._control("/continue_generation", {"torch_empty_cache": False})

    # ---- HTTP ----------------------------------------------------------------

    async def _control(
        self, path: str, body: dict[str, Any], limit: aiohttp.ClientTimeout | None = None
    ) -> dict[str, Any]:
        answer = await self._request("POST", path, body, limit or self._control_timeout)
        if not isinstance(answer, dict):
            return {}
        if answer.get("success") is False:
            raise EngineError(f"SGLang {path}: {answer.get('message', answer)}")
        return answer

    async def _request(
        self, method: str, path: str, body: dict[str, Any] | None, limit: aiohttp.ClientTimeout
    ) -> dict[str, Any] | list[dict[str, Any]]:
        try:
            asking = self._http.request(method, self._url + path, json=body, timeout=limit)
            async with asking as response:
                if response.status != 200:
                    raise EngineRefusedError(
                        f"SGLang {path}: {response.status} {(await response.text())[:300]}"
                    )
                answer: dict[str, Any] | list[dict[str, Any]] = msgspec.json.decode(
                    await response.read() or b"{}"
                )
        except TimeoutError as error:
            raise EngineError(f"SGLang {path}: no answer in {limit.total:.0f} s") from error
        except (aiohttp.ClientError, *UNREADABLE) as error:
            raise EngineError(f"SGLang {path}: {type(error).__name__} {error}") from error
        return answer


def image_data(images: Sequence[Sequence[PromptImage]]) -> dict[str, Any]:
    """Return the images of each sequence of a request, as ``sglang/images.py`` reads them."""
    if not any(images):
        return {}
    return {
        "image_data": [
            [msgspec.json.encode((span, str(file))).decode() for span, file in of_sequence]
            for of_sequence in images
        ]
    }


def completion_of(
    answer: dict[str, Any],
    params: SamplingParams,
    num_prompt_tokens: int,
    version: PolicyVersion | None = None,
) -> Completion:
    """Return a response; all of its tokens are of ``version``, unless the engine labels them.

    Raises:
        EngineError: the answer is malformed, reports a failure, or lacks what was asked for.
    """
    try:
        info = answer["meta_info"]
        token_ids: list[int] = answer["output_ids"]
        rows = info["output_token_logprobs"]
        reason = info["finish_reason"]["type"]
        spans = info["weight_versions"]
        kept: list[list[int]] | None = None
        logprobs = [row[0] for row in rows]
        if params.max_kept:
            kept, logprobs = (
                info[f"output_token_sampling_{name}"] for name in ("mask", "logprobs")
            )
    except (KeyError, TypeError) as error:
        raise EngineError(f"SGLang /generate: unexpected answer, {error!r}") from error
    if reason not in {"stop", "length"}:
        raise EngineError(f"SGLang /generate ended with {info['finish_reason']}")
    if [row[1] for row in rows] != token_ids or not token_ids:
        raise EngineError(f"SGLang /generate: {len(rows)} logprobs of {len(token_ids)} tokens")
    if kept is not None and not len(kept) == len(logprobs) == len(token_ids):
        raise EngineError(f"SGLang /generate: {len(kept)} masks of {len(token_ids)} tokens")
    return Completion(
        token_ids=token_ids,
        logprobs=logprobs,
        version_starts=(
            version_starts(spans, len(token_ids)) if version is None else [(0, version)]
        ),
        finish_reason="stop" if reason == "stop" else "length",
        kept=kept,
        experts=(
            None
            if params.experts_of is None
            else _experts(
                answer,
                num_prompt_tokens + len(token_ids) - 1 - params.experts_from,
                params.experts_of,
            )
        ),
    )


def scores_of(
    answers: Sequence[dict[str, Any]],
    sequences: Sequence[Sequence[int]],
    num_context: int,
    version: PolicyVersion | None = None,
) -> Scores:
    """Return the logprobs in the answers; all are of ``version``, unless the engine labels them.

    Raises:
        EngineError: an answer is malformed, or belongs to another sequence.
    """
    versions = set() if version is None else {version}
    logprobs: list[list[float]] = []
    num_cached = 0
    try:
        for answer, tokens in zip(answers, sequences, strict=True):
            info = answer["meta_info"]
            rows = info["input_token_logprobs"][1:]
            scored = [row[1] for row in rows]
            if not _are_scores_of(scored, tokens[num_context:]):
                raise EngineError(f"SGLang /generate: {len(rows)} logprobs of other tokens")
            logprobs.append([float(row[0]) for row in rows])
            if version is None:
                starts = version_starts(info["weight_versions"], len(answer["output_ids"]))
                versions.update(started for _, started in starts)
            num_cached = max(num_cached, info["cached_tokens"])
    except (KeyError, TypeError, IndexError) as error:
        raise EngineError(f"SGLang /generate: unexpected scores, {error!r}") from error
    return Scores(versions.pop() if len(versions) == 1 else None, logprobs, num_cached)


def _are_scores_of(scored: Sequence[int], tokens: Sequence[int]) -> bool:
    """True if ids in an answer are those that were asked for.

    In SGLang 0.5.23 the last id of the vocabulary comes back as 0, with its own logprob.
    """
    return len(scored) == len(tokens) and all(
        named in {asked, 0} for named, asked in zip(scored, tokens, strict=True)
    )


def _experts(answer: dict[str, Any], num_tokens: int, layers: ExpertLayers) -> NDArray[np.int32]:
    try:
        data = base64.b64decode(answer["meta_info"]["routed_experts"])
        chosen = np.frombuffer(data, "<i4").reshape(num_tokens, layers.total, -1)
    except (KeyError, TypeError, ValueError) as error:
        what = f"experts of {num_tokens} tokens in {layers.total} layers"
        raise EngineError(f"SGLang /generate: {what} asked, got {error!r}") from error
    return chosen[:, layers.dense :]
