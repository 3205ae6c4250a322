"""Corrections to SGLang 0.5.23 that its processes need on every device.

Installed at the top of the server's main module, so that processes that SGLang spawns get them
too: they import that module again before anything else.
"""

import copy
import datetime
import functools
import importlib
import importlib.abc
import importlib.util
import logging
import os
import random
import re
import sys
from collections.abc import Callable, Collection, Sequence
from importlib import metadata
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from typing_extensions import override

from slipstream.generators.sglang import (
    adoption,
    cpu_adapters,
    cpu_models,
    gpt_oss,
    images,
    log_noise,
    shadow_loads,
)
from slipstream.generators.sglang.mixed_batches import MixedBatches
from slipstream.generators.sglang.ranks import failure_of, of_all_ranks
from slipstream.generators.sglang.replacing import SGLANG_VERSION, replace
from slipstream.generators.sglang.tool_calls import SEPARATORS, Marks, ReadCall, read_reply
from slipstream.weightbus.version.engine_checksums import host_checksum
from slipstream.wire.errors import ConfigError, PublishError
from slipstream.wire.thoughts import split_thoughts

GROUP_TIMEOUT_VARIABLE = "SLIPSTREAM_GROUP_TIMEOUT_S"
ARCHITECTURE_VARIABLE = "SLIPSTREAM_ARCHITECTURE"  # one of ``architectures`` in config.json
SEEDS_VARIABLE = "SLIPSTREAM_SEEDS"  # 1: every request is sampled by a seed
ADAPTERS_VARIABLE = "SLIPSTREAM_ADAPTERS"  # 1: versions are adapters
RECEIVED_VARIABLE = adoption.RECEIVED_VARIABLE
SHADOW_VARIABLE = shadow_loads.SHADOW_VARIABLE
_OF_LAYER = re.compile(r"(\blayers\.\d+\.)(?=(qkv_proj|o_proj|q_norm|k_norm)\.)")
_WORD = re.compile(r"[a-z]+", re.IGNORECASE)
_CHANNEL = re.compile(r"<\|\w+\|>")
# What formats of channels write around a part, with the words between its marks.
_HEADER = re.compile(
    r"<\|(?:start|open|close|channel|message_model)\|>[^<]*(?=<\|)|<\|\w+\|>"
    r"|\A to=\S+(?=<\|message\|>)|\s"
)
_CLOSING = re.compile(r"eo[mt]|end|close|suffix", re.IGNORECASE)
_CALLING = re.compile(r"call|invoke|function|tool|param", re.IGNORECASE)
_GROUP_TIMEOUT_S = 120.0  # default
_ENDED = 0  # no session's generation; SGLang counts from 1
_GROUPS = "torch.distributed.distributed_c10d"
_MIN_NEW_TOKENS = "sglang.srt.sampling.penaltylib.min_new_tokens"
_SAMPLING_BATCH = "sglang.srt.sampling.sampling_batch_info"
_SAMPLER = "sglang.srt.layers.sampler"
_SCHEDULER = "sglang.srt.managers.scheduler"
_SCHEDULE_BATCH = "sglang.srt.managers.schedule_batch"
_BATCH_RESULTS = "sglang.srt.managers.scheduler_components.batch_result_processor"
_LOAD_INQUIRER = "sglang.srt.managers.scheduler_components.load_inquirer"
_UPDATES_OF_RANK = "sglang.srt.managers.scheduler_components.weight_updater"
_TOKENIZER = "sglang.srt.managers.tokenizer_manager"
_LORA_MANAGER = "sglang.srt.lora.lora_manager"
_TARGETS = "sglang.srt.utils.common"
_GATED = ("sglang.srt.models.qwen3_5_text", "sglang.srt.models.qwen3_next")
_FP8 = "sglang.srt.layers.quantization.fp8"
_WEIGHT_CHECKER = "sglang.srt.utils.weight_checker"
_MODEL_RUNNER = "sglang.srt.model_executor.model_runner"
_WEIGHT_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater"
_TOOL_PARSERS = "sglang.srt.function_call.function_call_parser"
_REASONING_PARSERS = "sglang.srt.parser.reasoning_parser"
_HYBRID = "sglang.srt.configs.qwen3_next"
_SEEING = "sglang.srt.models.qwen3_5"
_SESSIONS = "sglang.srt.mem_cache.unified_cache.session_ref_tracker"
_HTTP_SERVER = "sglang.srt.entrypoints.http_server"


def install() -> None:
    """Correct the modules named here right after their import.

    Raises:
        ConfigError: this is another SGLang version than theirs.
    """
    check_version(metadata.version("sglang"))
    log_noise.leave_out()
    retractions, experts, mixed = Retractions(), ExpertsBefore(), MixedBatches()

    def correct_updates_of_rank(module: ModuleType) -> None:
        adoption.load_whole_versions(module)
        answer_for_all_ranks(module)
        adoption.adopt_in_scheduler(module)

    def correct_scheduler(module: ModuleType) -> None:
        mixed.plan(module)
        images.forget_embeddings(module)

    def check_adapters(module: ModuleType) -> None:
        hash_bytes(module)
        _check_adapters(module)

    def correct_batches(module: ModuleType) -> None:
        retractions.count(module)
        experts.keep(module)
        mixed.mix(module)

    def correct_loads(module: ModuleType) -> None:
        retractions.report(module)
        mixed.report(module)

    corrections: dict[str, Callable[[ModuleType], None]] = {
        _SCHEDULER: correct_scheduler,
        _SCHEDULE_BATCH: correct_batches,
        _BATCH_RESULTS: experts.put_back,
        _LOAD_INQUIRER: correct_loads,
        _MIN_NEW_TOKENS: _count_tokens_before_retraction,
        _GROUPS: _bound_waits_in_groups,
        _MODEL_RUNNER: shadow_loads.keep_shadow,
        _WEIGHT_UPDATER: _correct_weight_updates,
        _UPDATES_OF_RANK: correct_updates_of_rank,
        _WEIGHT_CHECKER: hash_bytes,
        _TOKENIZER: adoption.adopt_in_tokenizer,
        _HTTP_SERVER: _freeze_nothing,
        _SESSIONS: keep_sessions,
        _HYBRID: take_listed_layers,
        _SEEING: _pass_over_pictures,
        _TOOL_PARSERS: keep_every_character,
        _REASONING_PARSERS: cut_at_marks,
        cpu_models.LATENT_BACKENDS: cpu_models.attend_to_latents,
        cpu_models.ROTARY: cpu_models.turn_without_scaling,
        cpu_models.QWEN2_MOE: cpu_models.gate_shared_experts,
        _FP8: _correct_fp8,
        cpu_models.EXPERTS: cpu_models.leave_out_far_experts,
        cpu_models.GATED_NORM: cpu_models.norm_with_gate,
        cpu_models.FUSED_GATED_NORM: cpu_models.norm_with_fused_gate,
        images.PROCESSORS: images.read_files,
        images.HUGGING_FACE: images.tokenize_alone,
        images.QWEN2_5_VL: images.load_whole_towers,
        images.QWEN3_VL: images.load_whole_towers,
        gpt_oss.MODEL: gpt_oss.correct,
        gpt_oss.ARGUMENTS: gpt_oss.take_native_attention,
    }
    if os.environ.get(SEEDS_VARIABLE) == "1":  # noqa: TID251 reaches spawned processes
        corrections |= {_SAMPLING_BATCH: _keep_seeds, _SAMPLER: sample_by_seed}
    if os.environ.get(ADAPTERS_VARIABLE) == "1":  # noqa: TID251 reaches spawned processes
        corrections |= {_LORA_MANAGER: _keep_manager, _WEIGHT_CHECKER: check_adapters}
        corrections |= {
            cpu_adapters.LAYERS: cpu_adapters.add_to_experts,
            cpu_adapters.LATENT: cpu_adapters.add_to_latents,
        }
        corrections |= {_TARGETS: _take_out_proj, **dict.fromkeys(_GATED, _size_gated_queries)}
    sys.meta_path.insert(0, _AfterImport(corrections))


def check_version(found: str) -> None:
    """Refuse an SGLang that may not use these patches, or no longer need them.

    Raises:
        ConfigError: with the version to install.
    """
    if found.partition("+")[0] != SGLANG_VERSION:  # after + comes the build
        raise ConfigError(
            f"SGLang {found} is installed, this version of Slipstream needs {SGLANG_VERSION}: "
            f"pip install sglang=={SGLANG_VERSION} (its corrections in generators/"
            "sglang/patches.py must be checked against another release)"
        )


def keep_every_character(module: ModuleType) -> None:
    """Have parsers of tool calls lose no character of a reply (``tool_calls``).

    What looks like a call and cannot be read is answered besides as a call without a name.
    """
    item_of, tool_of = module.ToolCallItem, module.Tool
    log = logging.getLogger(module.__package__)

    def parse_non_stream(
        parser: Any,  # noqa: ANN401 SGLang's
        full_text: str,
        *,
        preserve_incomplete: bool = False,
    ) -> tuple[str, list[Any]]:
        """Return the text of a reply and its calls."""
        del preserve_incomplete
        detector = parser.detector

        @functools.cache
        def tools_of(names: tuple[str, ...]) -> list[Any]:
            return [*parser.tools, *(tool_of(function={"name": name}) for name in names)]

        def read(text: str, names: Collection[str]) -> list[ReadCall]:
            try:
                found = copy.deepcopy(detector).detect_and_parse(text, tools_of(tuple(names)))
            except Exception:  # noqa: BLE001 unreadable text raises anything
                return []
            finally:
                log.setLevel(logging.CRITICAL + 1)  # lines about parts repeat the first one
            return [ReadCall(call.name or "", call.parameters) for call in found.calls]

        marks = _marks_of(detector, full_text)
        calling = {re.split(r"[(.\\]", mark)[0] for mark in marks.opening if _CALLING.search(mark)}
        begins = {detector.bot_token.strip(), *calling} - {""}

        def looks_like_call(part: str) -> bool:
            bare = part.lstrip(SEPARATORS)
            return any(mark in part for mark in begins) or bool(detector.has_tool_call(bare))

        try:
            reply = read_reply(full_text, read, looks_like_call, marks)
        finally:
            log.setLevel(logging.NOTSET)
        calls = [
            item_of(tool_index=-1, name=call.name, parameters=call.arguments)
            for call in reply.calls
        ]
        unread = [item_of(tool_index=-1, parameters=part) for part in reply.unread]
        return reply.text, calls + unread

    replace(module.FunctionCallParser, "parse_non_stream", parse_non_stream)


def _marks_of(detector: Any, full_text: str) -> Marks:  # noqa: ANN401 SGLang's
    """Return the marks of a parser's format, which are texts of its class and module."""
    owners = detector, sys.modules[type(detector).__module__]
    named = {
        (name, text.strip())
        for owner in owners
        for name in dir(owner)
        if not name.startswith("__") and isinstance(text := getattr(owner, name, None), str)
    }
    closing = {text for name, text in named if text and _CLOSING.search(name)}
    opening = {text for _, text in named if text[:1] in {"<", "["}} - closing
    opener = detector.bot_token.strip()  # without the blanks that a parser requires
    written = sorted((text for text in opening if text in full_text), key=full_text.index)
    tag = re.search(r"<[^<>\s]+>|$", full_text)
    first = next(iter(written), "") or (tag and tag[0]) or "["
    return Marks(opener or first, opening, closing)


def cut_at_marks(module: ModuleType) -> None:
    """Have parsers of thoughts cut them where their marks are, and lose no other character.

    SGLang's end a thought where a call begins in it, leave all but the first one in the text, and
    drop text between channels.
    """
    parse = module.ReasoningParser.parse_non_stream

    def parse_non_stream(parser: Any, full_text: str) -> tuple[str, str]:  # noqa: ANN401 SGLang's
        """Return the thoughts of a reply and its text."""
        detector = parser.detector
        begin, end = detector.think_start_token, detector.think_end_token
        if not begin or not end:
            found: tuple[str, str] = parse(parser, full_text)  # a template of the model's own
            return found
        # A closing mark without a word of the opening one ends other parts too.
        is_shared = set(_WORD.findall(begin)).isdisjoint(_WORD.findall(end))
        is_inside = (
            getattr(detector, "force_reasoning", False)
            and not is_shared
            and not _CHANNEL.match(full_text)  # it begins with another part
        )
        parts = split_thoughts(full_text, begin, end, is_inside=is_inside, is_shared=is_shared)
        thoughts = [part.thought for part in parts if part.thought is not None]
        label = detector.think_start_self_label
        thought = "\n".join(part.removeprefix(label) for part in thoughts)
        outside = "".join(part.text for part in parts if part.thought is None)
        detector._in_reasoning = False
        said = detector.detect_and_parse(outside).normal_text  # without marks of channels
        return thought, said if _HEADER.sub("", said) == _HEADER.sub("", outside) else outside

    replace(module.ReasoningParser, "parse_non_stream", parse_non_stream)


def _bound_waits_in_groups(module: ModuleType) -> None:
    """Bound how long an engine waits in a weight group for a sender that is gone.

    SGLang has no setting for it and takes torch's default of 30 minutes.
    """
    seconds = os.environ.get(GROUP_TIMEOUT_VARIABLE)  # noqa: TID251 reaches spawned processes
    if seconds:
        replace(module, "default_pg_timeout", datetime.timedelta(seconds=float(seconds)))


def _freeze_nothing(module: ModuleType) -> None:
    """Keep a server from asking itself to freeze its garbage collectors.

    SGLang asks over HTTP after its warm-up. Without one it asks before its socket listens, most of
    the time: its log gets four tracebacks, and nothing is frozen. ``sglang/process.py`` asks once
    the server answers.
    """

    def _freeze_gc_after_server_warmup(server_args: object) -> None:
        """Do nothing."""

    replace(module, "_freeze_gc_after_server_warmup", _freeze_gc_after_server_warmup)


def _correct_weight_updates(module: ModuleType) -> None:
    _answer_failed_loads(module)
    _answer_when_bytes_are_there(module)
    _read_without_a_copy(module)


def _read_without_a_copy(module: ModuleType) -> None:
    """Load a version from its file tensor by tensor, where it is mapped.

    SGLang reads files by threads, one for each, that copy a whole file before its first tensor is
    loaded. A version is one file, in memory or just written.
    """
    one_by_one = {"enable_multithread_load": False}
    config = functools.partial(module.LoadConfig, model_loader_extra_config=one_by_one)
    replace(module, "LoadConfig", config)


def _answer_when_bytes_are_there(module: ModuleType) -> None:
    """Take part in a group with a deadline, and answer success when the bytes of a bucket are here.

    On a GPU, SGLang answers as soon as NCCL has queued the transfer, and a group that it leaves
    waits for transfers that may never end. Remove when SGLang waits and aborts by itself.
    """
    timeout_s = float(os.environ.get(GROUP_TIMEOUT_VARIABLE, _GROUP_TIMEOUT_S))  # noqa: TID251 as above
    _join_and_leave_in_time(module.WeightUpdater, timeout_s)
    _receive_in_time(module.WeightUpdater, module.FlattenedTensorBucket, timeout_s)


def _join_and_leave_in_time(updater: type[Any], timeout_s: float) -> None:
    import torch  # in the process of the weights, not in the agent's

    from slipstream.weightbus.net import groups, threads

    join = updater.init_weights_update_group

    def init_weights_update_group(
        self: Any,  # noqa: ANN401
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str = "nccl",
    ) -> tuple[bool, str]:
        place = (master_address, master_port, rank_offset, world_size, group_name)
        is_joined, message = join(self, *place, backend)
        if is_joined:
            try:
                groups.pass_first_byte(
                    self._model_update_group[group_name],
                    torch.device(self.device if backend == "nccl" else "cpu"),
                    timeout_s=timeout_s,
                )
            except PublishError as error:
                destroy_weights_update_group(self, group_name)
                return False, str(error)
        return is_joined, message

    def destroy_weights_update_group(self: Any, group_name: str) -> tuple[bool, str]:  # noqa: ANN401
        group = self._model_update_group.pop(group_name, None)
        if group is None:
            return False, f"there is no group {group_name}"
        try:
            threads.in_time(lambda: groups.release(group), timeout_s)
        except (TimeoutError, RuntimeError, ValueError) as error:
            return False, f"group {group_name} could not be left: {error!r}"
        return True, f"group {group_name} is left"

    replace(updater, "init_weights_update_group", init_weights_update_group)
    replace(updater, "destroy_weights_update_group", destroy_weights_update_group)


def _receive_in_time(updater: type[Any], bucket_type: Any, timeout_s: float) -> None:  # noqa: ANN401
    from slipstream.weightbus.net import groups

    def _receive_bucketed_weights_from_distributed(
        self: Any,  # noqa: ANN401
        *,
        names: Any,  # noqa: ANN401
        dtypes: Any,  # noqa: ANN401
        shapes: Any,  # noqa: ANN401
        group_name: str,
    ) -> Any:  # noqa: ANN401
        bucket = bucket_type.empty(names, dtypes, shapes, self.device)
        group = self._model_update_group[group_name]
        groups.broadcast(bucket.get_flattened_tensor(), group, timeout_s=timeout_s)
        return bucket.reconstruct_tensors()

    name = "_receive_bucketed_weights_from_distributed"
    replace(updater, name, _receive_bucketed_weights_from_distributed)


def answer_for_all_ranks(module: ModuleType) -> None:
    """Answer that weights are loaded when they are on every rank of this engine.

    SGLang's first rank answers for all, and does not ask the others. Remove when it does.
    """
    manager = module.SchedulerWeightUpdaterManager

    def corrected(name: str) -> Callable[[Any, Any], Any]:
        update = getattr(manager, name)

        def update_on_all_ranks(self: Any, recv_req: Any) -> Any:  # noqa: ANN401
            output = update(self, recv_req)
            try:
                succeeded = of_all_ranks(output.success, self.tp_cpu_group)
            except RuntimeError as error:
                output.success, output.message = False, f"the ranks of an engine are apart: {error}"
                return output
            if output.success and not all(succeeded):
                output.success, output.message = False, failure_of(succeeded.index(0))
            return output

        return update_on_all_ranks

    for name in (
        "init_weights_update_group",
        "update_weights_from_distributed",
        "update_weights_from_disk",
    ):
        replace(manager, name, corrected(name))


def _answer_failed_loads(module: ModuleType) -> None:
    """Answer that weights could not be loaded from disk, instead of ending the server.

    SGLang tries to restore its weights, but reads the same damaged file for that, and dies. The
    caller takes the engine to hold a mixture and loads a whole version next. Remove when SGLang
    answers by itself.
    """
    updater = module.WeightUpdater
    load = updater.update_weights_from_disk

    def update_weights_from_disk(self: Any, *arguments: Any, **named: Any) -> Any:  # noqa: ANN401
        try:
            return load(self, *arguments, **named)
        except Exception as error:  # noqa: BLE001 the engine can be repaired after any error
            return False, f"Failed to update weights: {error}"

    replace(updater, "update_weights_from_disk", update_weights_from_disk)


class Retractions:
    """Counts how often the scheduler ran out of memory for keys and values, since its start.

    SGLang's own figure is that of the newest retraction, is overwritten by the next, and becomes 0
    some batches later: polling twice a second misses most of them. Here it is a count, under the
    same name, ``queues.retracted`` of /v1/loads. Retractions by a pause do not count. Remove
    when SGLang reports a count without --enable-metrics.
    """

    def __init__(self) -> None:
        self._num = 0

    def count(self, module: ModuleType) -> None:
        """Count the sequences that the scheduler gives up while it decodes."""
        batch = module.ScheduleBatch
        retract = batch.retract_decode

        def retract_decode(batch_of_requests: Any) -> Any:  # noqa: ANN401
            retracted, *others = retract(batch_of_requests)
            self._num += len(retracted)
            return retracted, *others

        replace(batch, "retract_decode", retract_decode)

    def report(self, module: ModuleType) -> None:
        """Add the count to the load that the scheduler publishes."""
        inquirer = module.SchedulerLoadInquirer
        inquire = inquirer.get_loads

        def get_loads(of: Any) -> Any:  # noqa: ANN401
            snapshot = inquire(of)
            snapshot.queues.retracted = self._num
            return snapshot

        replace(inquirer, "get_loads", get_loads)


class ExpertsBefore:
    """Keeps the experts that were chosen for an answer before it was retracted.

    SGLang keeps them with keys and values. A retracted answer is prefilled again, perhaps under new
    weights: its experts are then those of the prefill, not those that its tokens were chosen with.
    Remove when SGLang keeps them with the request.
    """

    def __init__(self) -> None:
        self._capturer: Callable[[], Any] = lambda: None

    def keep(self, module: ModuleType) -> None:
        """Keep the experts of tokens whose keys and values are given up."""
        release = module.release_req

        def release_req(*, req: Any, req_to_token_pool: Any, **rest: Any) -> Any:  # noqa: ANN401
            capturer = self._capturer()
            if capturer is not None and req.return_routed_experts and req.output_ids:
                before = getattr(req, "experts_before", None)
                every = capturer.get_topk(
                    req_pool_idx=req.kv.req_pool_idx,
                    seqlen=len(req.origin_input_ids) + len(req.output_ids),
                    req_to_token_pool=req_to_token_pool,
                    start_len=req.routed_experts_start_len,
                )
                if before is not None:
                    every[: len(before)] = before
                req.experts_before = every
            return release(req=req, req_to_token_pool=req_to_token_pool, **rest)

        replace(module, "release_req", release_req)

    def put_back(self, module: ModuleType) -> None:
        """Answer with the experts that were kept."""
        self._capturer = module.get_global_experts_capturer
        processor = module.SchedulerBatchResultProcessor
        collect = processor._maybe_collect_routed_experts

        def _maybe_collect_routed_experts(self: Any, req: Any) -> None:  # noqa: ANN401
            collect(self, req)
            before = getattr(req, "experts_before", None)
            if req.routed_experts is not None and before is not None:
                req.routed_experts[: len(before)] = before

        replace(processor, "_maybe_collect_routed_experts", _maybe_collect_routed_experts)


def _count_tokens_before_retraction(module: ModuleType) -> None:
    """Let ``min_new_tokens`` count from the start of a response, not from its last retraction.

    A retracted request is prefilled again, and SGLang restarts its count: a response could
    then not end for another ``min_new_tokens``, and its logprobs would be of a distribution that
    was not requested. Remove when SGLang counts ``req.output_ids`` itself.
    """
    import torch  # in the process that samples, not in the agent's

    penalizer = module.BatchedMinNewTokensPenalizer
    prepare = penalizer._prepare

    def prepare_from_output(self: Any) -> None:  # noqa: ANN401
        prepare(self)
        lengths = [[len(req.output_ids)] for req in self.orchestrator.reqs()]
        device = self.orchestrator.device
        self.len_output_tokens = torch.tensor(lengths, dtype=torch.int32, device=device)

    replace(penalizer, "_prepare", prepare_from_output)


def keep_sessions(module: ModuleType) -> None:
    """Have sessions begin with a request, stay when the prefix cache is flushed, and end for good.

    A flush of SGLang forgets them: the prefixes of responses that a pause retracted would have no
    session, and be evicted first while their trajectories live. And a request that a pause kept
    back opens its session again, if that ended meanwhile. Remove when SGLang does neither.
    """
    tracker = module.UnifiedSessionRefTracker
    forget, find = tracker.reset, tracker.ensure_session_generation

    def reset(self: Any) -> None:  # noqa: ANN401
        kept = vars(self).copy()
        forget(self)
        vars(self).update(kept)

    def ensure_session_generation(self: Any, session_id: str) -> int:  # noqa: ANN401
        return _ENDED if session_id in self._closed_session_ids else find(self, session_id)

    replace(tracker, "reset", reset)
    replace(tracker, "ensure_session_generation", ensure_session_generation)


def take_listed_layers(module: ModuleType) -> None:
    """Give hybrid models the kinds of layers that their config.json lists.

    SGLang counts them by ``full_attention_interval``, which transformers 5 does not write, and
    ignores ``layer_types``. Remove when it reads the list.
    """
    config = module.Qwen3NextConfig
    begin, counted = config.__init__, config.layers_block_type.fget

    def __init__(self: Any, *given: Any, layer_types: Any = None, **named: Any) -> None:  # noqa: ANN401, N807
        self.listed_layers = [
            "attention" if kind == "full_attention" else kind for kind in layer_types or ()
        ]
        if layer_types:
            first = [*self.listed_layers, "attention"].index("attention")
            named.setdefault("full_attention_interval", first + 1)
        begin(self, *given, **named)

    def layers_block_type(self: Any) -> Any:  # noqa: ANN401
        # A draft has fewer layers.
        is_listed = len(self.listed_layers) == self.num_hidden_layers
        return self.listed_layers if is_listed else counted(self)

    replace(config, "__init__", __init__)
    replace(config, "layers_block_type", property(layers_block_type))


def _pass_over_pictures(module: ModuleType) -> None:
    """Pass over the encoder's tensors where the language model is alone (``start_order.py``).

    SGLang reads each, and warns that there is no place for it.
    """

    def language_alone(load: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def load_weights(self: Any, weights: Any) -> Any:  # noqa: ANN401
            if self.language_model_only:
                weights = (named for named in weights if "visual." not in named[0])
            return load(self, weights)

        return load_weights

    for name in ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"):
        model = getattr(module, name)
        replace(model, "load_weights", language_alone(model.load_weights))


def _keep_seeds(module: ModuleType) -> None:
    """Give every row of a batch its request's seed, or a random one.

    SGLang reads seeds with --enable-deterministic-inference alone, which selects slow kernels
    that do not depend on the batch. Every row needs one, because batches are merged. Remove when
    SGLang honours seeds without those kernels.
    """
    import torch  # in the process that samples, not in the agent's

    batch_info = module.SamplingBatchInfo
    build = batch_info.from_schedule_batch.__func__

    def from_schedule_batch(cls: Any, batch: Any, vocab_size: int) -> Any:  # noqa: ANN401
        info = build(cls, batch, vocab_size)
        if info.sampling_seed is None:
            asked = [req.sampling_params.sampling_seed for req in batch.reqs]
            seeds = [random.getrandbits(63) if seed is None else seed for seed in asked]
            info.sampling_seed = torch.tensor(seeds, dtype=torch.int64).to(batch.device)
        return info

    replace(batch_info, "from_schedule_batch", classmethod(from_schedule_batch))


def sample_by_seed(module: ModuleType) -> None:
    """Choose a token from its row's probabilities, seed and position.

    SGLang's own way needs a kernel that a CPU lacks, and noise for every token of the
    vocabulary. Here one number per row is looked up in the cumulative distribution: exact, and
    a token of probability 0 is never chosen. Remove together with ``_keep_seeds``.
    """
    from slipstream.generators.sglang import seeded_sampling  # torch, as above

    replace(module, "sampling_from_probs_torch", seeded_sampling.sampling_from_probs)
    replace(
        module,
        "top_k_top_p_min_p_sampling_from_probs_torch",
        seeded_sampling.sampling_from_truncated_probs,
    )


def hash_bytes(module: ModuleType) -> None:
    """Hash the bytes of every tensor; on the host by xxh3-128, at the speed of memory.

    SGLang takes sha256 there, an order of magnitude slower; what is compared has no enemies. Of
    matrices in fp8 it hashes what they stand for, in bfloat16: other bytes may stand for the same.
    What it derives of a norm's weight (layernorm.py:1112) or of mrope_section (mrope.py:109) is no
    tensor of a version. Attention of hybrid models is a part of its layer there, and has the names
    that it has elsewhere.
    """
    import torch  # in the process of the weights, not in the agent's

    of_gpu, state_of = module._hash_tensor, module.WeightChecker._model_state

    def _model_state(self: Any) -> Any:  # noqa: ANN401
        for name, tensor in state_of(self):
            yield _OF_LAYER.sub(r"\1self_attn.", name), tensor

    def _hash_tensor(t: Any) -> str:  # noqa: ANN401
        if t.is_cuda:
            return str(of_gpu(t))
        return host_checksum([t.detach().contiguous().view(-1).view(torch.uint8).numpy()])

    def _build_quantized_set(model: Any) -> dict[str, Any]:  # noqa: ANN401
        del model
        return {}

    left_out = (*module._NON_PERSISTENT_BUFFER_PATTERNS, "gemma_weight", "axis_map")
    replace(module.WeightChecker, "_model_state", _model_state)
    replace(module, "_NON_PERSISTENT_BUFFER_PATTERNS", left_out)
    replace(module, "_hash_tensor", _hash_tensor)
    replace(module, "_build_quantized_set", _build_quantized_set)


def _keep_manager(module: ModuleType) -> None:
    """Have a model lead to the manager of its adapters, for ``_check_adapters``."""
    manager = module.LoRAManager
    prepare = manager.init_lora_adapters

    def init_lora_adapters(self: Any, lora_paths: Any = None) -> None:  # noqa: ANN401
        prepare(self, lora_paths)
        self.base_model._slipstream_adapters = self

    replace(manager, "init_lora_adapters", init_lora_adapters)


def _take_out_proj(module: ModuleType) -> None:
    """Take the last projection of linear attention as a target on the command line, too.

    SGLang has adapters for it (lora/utils.py:304), and its list of targets lacks it. Remove when it
    is there.
    """
    module.SUPPORTED_LORA_TARGET_MODULES.append("out_proj")


def _size_gated_queries(module: ModuleType) -> None:
    """Give adapters of queries the rows of the output's gate, which hybrid models fuse with them.

    Their text models have no sizes of their own (lora/utils.py:157), as those that also see have.
    Remove when they do.
    """
    get_default_hidden_dim = importlib.import_module("sglang.srt.lora.utils").get_default_hidden_dim

    def get_hidden_dim(self: Any, module_name: str, layer_idx: int) -> Any:  # noqa: ANN401
        config = self.config
        if module_name == "qkv_proj":
            heads = 2 * (config.num_attention_heads + config.num_key_value_heads)
            return config.hidden_size, config.head_dim * heads
        if module_name == "out_proj":
            values = config.linear_num_value_heads * config.linear_value_head_dim
            return values, config.hidden_size
        return get_default_hidden_dim(module_name, config, layer_idx)

    for model in module.EntryClass if isinstance(module.EntryClass, list) else [module.EntryClass]:
        model.get_hidden_dim = get_hidden_dim


def _check_adapters(module: ModuleType) -> None:
    """Have the weights checker answer with checksums of adapters, and not of the weights below.

    SGLang compares the bytes of adapters before it keeps them, if at all, and cannot be asked what
    it keeps. Answered for are the tensors from which it fills its pool, on every rank: fused as it
    fuses them, by ``NAME OF THE ADAPTER/NAME OF THE TENSOR``. Remove when its own checker has them.
    """
    checker = module.WeightChecker

    def _model_state(self: Any) -> Any:  # noqa: ANN401
        manager = self._get_model()._slipstream_adapters
        for uid, adapter in manager.loras.items():
            for layer in adapter.layers:
                for name, tensor in layer.weights.items():
                    yield f"{manager.lora_refs[uid].lora_name}/{name}", tensor

    replace(checker, "_model_state", _model_state)


def _correct_fp8(module: ModuleType) -> None:
    from slipstream.generators.sglang import fp8  # torch, as above

    fp8.correct(module)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Runs a function on a module when it was imported for the first time."""

    def __init__(self, corrections: dict[str, Callable[[ModuleType], None]]) -> None:
        self._corrections = corrections

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        correct = self._corrections.pop(fullname, None)
        if correct is None:
            return None
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            correct(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
