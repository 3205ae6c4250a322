import types
from dataclasses import make_dataclass
from types import SimpleNamespace as Request

import pytest
import torch

from slipstream.generators.sglang import seeded_sampling
from slipstream.generators.sglang.mixed_batches import MixedBatches
from slipstream.generators.sglang.patches import (
    ExpertsBefore,
    Retractions,
    check_version,
    keep_sessions,
    sample_by_seed,
)
from slipstream.generators.sglang.replacing import leave_out, replace
from slipstream.wire.errors import ConfigError


def test_only_the_release_that_the_corrections_were_written_for_is_taken():
    check_version("0.5.23")
    check_version("0.5.23+cpu")
    for other in ("0.5.24", "0.5.23.post1", "0.6.0"):
        with pytest.raises(ConfigError, match=rf"SGLang {other} is installed, .*==0\.5\.23"):
            check_version(other)


def test_a_flush_forgets_prefixes_and_not_whose_they_are_and_what_ended_stays_ended():
    class Tracker:
        def __init__(self) -> None:
            self.forgotten = 0
            self.reset()

        def reset(self) -> None:
            self.sessions: dict[str, int] = {}
            self._closed_session_ids: set[str] = set()
            self.counter = 0
            flushes.append("forgets")

        def ensure_session_generation(self, session_id: str) -> int:
            self._closed_session_ids.discard(session_id)
            return self.sessions.setdefault(session_id, 7)

    flushes: list[str] = []
    module = types.ModuleType("session_ref_tracker")
    module.__dict__["UnifiedSessionRefTracker"] = Tracker
    keep_sessions(module)
    tracker = Tracker()
    tracker.sessions["a"] = tracker.counter = 1
    tracker.reset()
    assert flushes == ["forgets", "forgets"]
    assert (tracker.sessions, tracker.counter) == ({"a": 1}, 1)
    tracker._closed_session_ids.add("ended")
    assert tracker.ensure_session_generation("ended") == 0
    assert tracker.ensure_session_generation("new") == 7
    assert tracker.sessions == {"a": 1, "new": 7}


def test_what_is_not_there_is_not_replaced():
    module = types.ModuleType("sampler")
    module.__dict__["sample"] = len
    replace(module, "sample", max)
    assert vars(module)["sample"] is max
    with pytest.raises(ConfigError, match=r"sampler has no sampling, which .* replaces"):
        replace(module, "sampling", max)
    assert "sampling" not in vars(module)


def test_what_takes_other_arguments_is_not_replaced():
    class Updater:
        def load(self, path: str, *, strict: bool = True) -> None: ...

        @classmethod
        def build(cls, batch: list[int]) -> None: ...

    def load(updater: Updater, path: str, *, strict: bool = False) -> None:
        del updater, path, strict

    def whatever(updater: Updater, *arguments: object, **named: object) -> None:
        del updater, arguments, named

    replace(Updater, "load", load)
    replace(Updater, "load", whatever)
    Updater.load = load
    for other in (
        lambda self, path: (self, path),
        lambda self, way, *, strict: (self, way, strict),
    ):
        with pytest.raises(
            ConfigError, match=r"Updater.load takes \(path, strict\), what .* takes \("
        ):
            replace(Updater, "load", other)
    with pytest.raises(ConfigError, match=r"Updater.build takes \(batch\), what replaces it"):
        replace(Updater, "build", classmethod(lambda cls: cls))


class Planner:
    limit = 3

    def plan(self, waiting: int) -> int:
        if (
            waiting > 0
            and waiting < self.limit
            and not waiting % 2
        ):  # fmt: skip
            return waiting
        raise LookupError

    def twice(self) -> int:
        number = 1
        number += 1
        number += 1
        return number


def test_a_line_is_left_out_of_a_method_that_has_it_once():
    with pytest.raises(LookupError) as before:
        Planner().plan(5)
    leave_out(Planner, "plan", "and waiting < self.limit")
    assert Planner().plan(8) == 8
    with pytest.raises(LookupError) as after:
        Planner().plan(5)
    assert before.tb.tb_next is not None
    assert after.tb.tb_next is not None
    assert before.tb.tb_next.tb_lineno == after.tb.tb_next.tb_lineno
    assert Planner.plan.__code__.co_filename == __file__
    for name, line, count in [("plan", "and waiting < 4", 0), ("twice", "number += 1", 2)]:
        with pytest.raises(ConfigError, match=rf"Planner\.{name} has {count} lines `"):
            leave_out(Planner, name, line)


def test_a_method_without_its_source_is_refused():
    made = make_dataclass("Made", ["limit"])
    with pytest.raises(ConfigError, match=r"Made\.__init__ has no source, .* its \.py files"):
        leave_out(made, "__init__", "self.limit = limit")


NAMES = ("sampling_from_probs_torch", "top_k_top_p_min_p_sampling_from_probs_torch")


def test_a_sampler_without_a_function_that_takes_seeds_is_refused():
    module = types.ModuleType("sampler")
    module.__dict__.update(dict.fromkeys(NAMES[:1], len))
    with pytest.raises(ConfigError, match=f"sampler has no {NAMES[1]}"):
        sample_by_seed(module)
    module.__dict__.update(dict.fromkeys(NAMES, len))
    sample_by_seed(module)
    assert vars(module)[NAMES[0]] is seeded_sampling.sampling_from_probs
    assert vars(module)[NAMES[1]] is seeded_sampling.sampling_from_truncated_probs


class Queues:
    retracted = 0


class Snapshot:
    def __init__(self) -> None:
        self.queues = Queues()


class Batch:
    """As ScheduleBatch: what it retracts, a ratio, what it gives up for good."""

    def __init__(self, *retracted: str) -> None:
        self.retracted = list(retracted)

    def retract_decode(self) -> tuple[list[str], float, list[str]]:
        return self.retracted, 0.5, ["aborted"]


class Inquirer:
    def get_loads(self) -> Snapshot:
        return Snapshot()


def test_retractions_are_counted_over_batches_and_reported_with_loads():
    retractions = Retractions()
    batches, inquirers = types.ModuleType("batches"), types.ModuleType("inquirers")
    batches.__dict__["ScheduleBatch"] = type("ScheduleBatch", (Batch,), dict(vars(Batch)))
    inquirers.__dict__["SchedulerLoadInquirer"] = type("Asked", (Inquirer,), dict(vars(Inquirer)))
    retractions.count(batches)
    retractions.report(inquirers)
    load = inquirers.SchedulerLoadInquirer()
    assert load.get_loads().queues.retracted == 0
    answer = batches.ScheduleBatch("a", "b").retract_decode()
    assert answer == (["a", "b"], 0.5, ["aborted"])
    assert load.get_loads().queues.retracted == 2
    batches.ScheduleBatch("c").retract_decode()
    assert load.get_loads().queues.retracted == 3


class MixedBatch:
    """As ScheduleBatch: what it mixes in is asked for the logprobs of its inputs."""

    def __init__(self, *reqs: Request) -> None:
        self.reqs = list(reqs)
        self.extend_logprob_start_lens = [5] * len(reqs)

    def batch_size(self) -> int:
        return len(self.reqs)

    def mix_with_running(self, running_batch: "MixedBatch") -> None:
        self.reqs += running_batch.reqs
        self.extend_logprob_start_lens = [5, *[0] * len(running_batch.reqs)]


def sequence(is_finished: bool = False, is_retracted: bool = False) -> Request:
    return Request(finished=lambda: is_finished, is_retracted=is_retracted)


def test_decoded_answers_of_a_mixed_batch_have_no_logprobs_of_inputs_and_are_running():
    mixed, num_running = MixedBatches(), 0
    batches, inquirers = types.ModuleType("batches"), types.ModuleType("inquirers")

    def get_loads(_of: object) -> Request:
        return Request(num_running_reqs=num_running)

    batches.__dict__["ScheduleBatch"] = type("Batch", (MixedBatch,), dict(vars(MixedBatch)))
    inquirers.__dict__["SchedulerLoadInquirer"] = type("Asked", (), {"get_loads": get_loads})
    mixed.mix(batches)
    mixed.report(inquirers)
    load = inquirers.SchedulerLoadInquirer()
    assert load.get_loads().num_running_reqs == 0
    new = batches.ScheduleBatch(sequence())
    new.mix_with_running(batches.ScheduleBatch(sequence(), sequence(True), sequence(False, True)))
    assert new.extend_logprob_start_lens == [5, 1, 1, 1]
    assert load.get_loads().num_running_reqs == 2, "one is prefilled, one is decoded"
    num_running = 7
    assert load.get_loads().num_running_reqs == 7
    num_running = 0
    del new
    assert load.get_loads().num_running_reqs == 0


POOL = object()  # of SGLang


class Capturer:
    """As SGLang's: experts by position, of the newest time that it was computed."""

    def __init__(self) -> None:
        self.rows = torch.zeros(9, 1, 1, dtype=torch.int32)

    def get_topk(
        self, req_pool_idx: int, seqlen: int, req_to_token_pool: object, start_len: int = 0
    ) -> torch.Tensor:
        assert (req_pool_idx, req_to_token_pool) == (4, POOL)
        return self.rows[start_len : seqlen - 1].clone()


class Processor:
    """As SchedulerBatchResultProcessor."""

    def __init__(self, capturer: Capturer) -> None:
        self.capturer = capturer

    def _maybe_collect_routed_experts(self, req: Request) -> None:
        length = len(req.origin_input_ids) + len(req.output_ids)
        start = req.routed_experts_start_len
        req.routed_experts = self.capturer.get_topk(4, length, POOL, start)


def answer(start: int = 0) -> Request:
    return Request(
        return_routed_experts=True,
        origin_input_ids=[1, 2],
        output_ids=[],
        kv=Request(req_pool_idx=4),
        routed_experts=None,
        routed_experts_start_len=start,
    )


def test_an_answer_keeps_the_experts_of_before_each_retraction():
    capturer, released = Capturer(), []
    batches, results = types.ModuleType("batches"), types.ModuleType("results")

    def release_req(*, req: Request, req_to_token_pool: object, offload_kv: bool = True) -> bool:
        released.append((req, req_to_token_pool, offload_kv))
        return offload_kv

    batches.__dict__["release_req"] = release_req
    results.__dict__["SchedulerBatchResultProcessor"] = type(
        "P", (Processor,), dict(vars(Processor))
    )
    results.__dict__["get_global_experts_capturer"] = lambda: capturer
    experts = ExpertsBefore()
    experts.keep(batches)
    experts.put_back(results)
    processor = results.SchedulerBatchResultProcessor(capturer)

    def retract(req: Request) -> None:
        assert batches.release_req(req=req, req_to_token_pool=POOL, offload_kv=False) is False

    for start in (0, 1):
        req = answer(start)
        retract(req)  # before its first token: nothing was decided
        for version, output_ids in enumerate(([3], [3, 4, 5], [3, 4, 5, 6]), start=1):
            req.output_ids = output_ids
            capturer.rows[:] = version  # all that is cached was computed under it
            if version < 3:
                retract(req)
        processor._maybe_collect_routed_experts(req)
        assert req.routed_experts.flatten().tolist() == [1, 1, 2, 2, 3][start:]
    plain = answer()
    plain.return_routed_experts, plain.output_ids = False, [3]
    retract(plain)
    assert not hasattr(plain, "experts_before")
    assert len(released) == 7


def test_a_scheduler_without_what_is_counted_is_refused():
    batches = types.ModuleType("batches")
    batches.__dict__["ScheduleBatch"] = type("ScheduleBatch", (), {})
    with pytest.raises((AttributeError, ConfigError), match="retract_decode"):
        Retractions().count(batches)
