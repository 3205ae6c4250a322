"""What generators, reward workers and a learner do to a broker, without engines and models.

They are lean so that two cores are left to the broker and its Redis: requests are pipelined, one
trajectory's bytes are sent over and over, and nothing is decoded but the control messages.
"""

import os
import time
from collections import deque
from dataclasses import dataclass

import zmq

from benchmarks.broker.peer import Peer
from benchmarks.broker.process import SharedNumber
from slipstream.wire.messages.broker import (
    BatchDelivered,
    BatchNotReady,
    Done,
    FetchPayloads,
    GroupsLeased,
    LeasedGroup,
    LeaseGroups,
    LeaseScoring,
    Payloads,
    RequestBatch,
    ScoringLeased,
    SealSteps,
    StepCommit,
    StepCommitted,
    SubmitScores,
    SubmitTrajectory,
    TakeOver,
    TookOver,
)
from slipstream.wire.messages.trajectory import Score, TrajectoryHeader, VersionRun
from slipstream.wire.messages.versions import PolicyVersion

PROMPT_TOKENS = 64
BYTES_PER_TOKEN = 9  # int32 id, float32 logprob, mask
WAIT_S = 0.5
POLL_S = 0.002  # how soon a role sees that the learner's version has changed
_KEYS_PER_FETCH = 64
_EPOCH = 1 << 32


@dataclass(frozen=True, slots=True)
class Bytes:
    """One trajectory as it is sent: the frames, and how many tokens they contain."""

    payload: bytes
    response: bytes
    num_tokens: int

    @property
    def num_bytes(self) -> int:
        return len(self.payload) + len(self.response)


def trajectory_bytes(payload_bytes: int) -> Bytes:
    num_tokens = max(PROMPT_TOKENS + 1, payload_bytes // BYTES_PER_TOKEN)
    return Bytes(os.urandom(payload_bytes), b"the sum is 42 " * 24, num_tokens)


def pack(version: PolicyVersion) -> int:
    """Return a version as the number that drivers share."""
    return version.epoch * _EPOCH + version.step


def unpack(number: int) -> PolicyVersion:
    return PolicyVersion(*divmod(number, _EPOCH))


def header_of(
    group: LeasedGroup, sibling: int, num_tokens: int, version: PolicyVersion
) -> TrajectoryHeader:
    return TrajectoryHeader(
        group_id=group.group_id,
        sibling=sibling,
        lease_id=group.lease_id,
        num_prompt_tokens=PROMPT_TOKENS,
        num_tokens=num_tokens,
        version_runs=(VersionRun(PROMPT_TOKENS, version),),
        temperature=1.0,
        finish_reason="stop",
    )


class Generator:
    """Leases groups and submits their siblings, at most ``window`` unacknowledged."""

    def __init__(self, peer: Peer, sent: Bytes, *, window: int = 512, lanes: int = 512) -> None:
        self.peer = peer
        self._sent = sent
        self._window = window
        self._lanes = lanes
        self._asked: tuple[bytes, PolicyVersion] | None = None
        self._versions: dict[bytes, PolicyVersion] = {}  # of requests for work
        self._todo: deque[tuple[LeasedGroup, int, PolicyVersion]] = deque()
        self._unanswered: set[bytes] = set()
        self.acked = 0
        self.leased = 0

    @property
    def num_todo(self) -> int:
        return len(self._todo)

    def lease(self, adopted: PolicyVersion) -> None:
        """Ask for work, unless that has been asked for already or enough is here."""
        is_asked = self._asked is not None and self._asked[1] == adopted
        if not is_asked and len(self._todo) < self._lanes // 2:
            wanted = LeaseGroups(adopted=adopted, max_sequences=self._lanes, wait_s=WAIT_S)
            self._asked = (self.peer.send(wanted), adopted)  # a newer one ends the older one
            self._versions[self._asked[0]] = adopted

    def submit(self) -> None:
        while self._todo and len(self._unanswered) < self._window:
            group, sibling, version = self._todo.popleft()
            header = header_of(group, sibling, self._sent.num_tokens, version)
            message = SubmitTrajectory(header=header)
            sent = self.peer.send(message, self._sent.payload, self._sent.response)
            self._unanswered.add(sent)

    def listen(self, timeout_s: float) -> None:
        """Take all answers that are there; wait for the first."""
        while (received := self.peer.receive(timeout_s)) is not None:
            timeout_s = 0.0
            request_id, answer, _ = received
            if isinstance(answer, GroupsLeased):
                version = self._versions.pop(request_id)
                if self._asked is not None and self._asked[0] == request_id:
                    self._asked = None
                self.leased += len(answer.groups)
                self._todo += [(g, s, version) for g in answer.groups for s in g.siblings]
            elif isinstance(answer, Done):
                self._unanswered.discard(request_id)
                self.acked += 1


class Scorer:
    """Scores what is there: siblings get different rewards."""

    def __init__(self, peer: Peer, *, credits_: int = 256) -> None:
        self.peer = peer
        self._credits = credits_
        self.scored = 0
        self._ask()

    def _ask(self) -> None:
        self.peer.send(LeaseScoring(credits=self._credits, wait_s=WAIT_S))

    def listen(self) -> None:
        while (received := self.peer.receive(0.0)) is not None:
            answer = received[1]
            if isinstance(answer, ScoringLeased):
                scores = tuple(
                    Score(
                        group_id=item.group_id,
                        sibling=item.sibling,
                        lease_id=item.lease_id,
                        reward=float(item.sibling),
                    )
                    for item in answer.items
                )
                if scores:
                    self.peer.send(SubmitScores(scores=scores))
                    self.scored += len(scores)
                self._ask()


class Learner:
    """Takes batches, fetches their payloads, commits; takes and fetches the next one meanwhile."""

    def __init__(self, peer: Peer, *, step: int, seal_every: int) -> None:
        self.peer = peer
        self._seal_every = seal_every
        self.version = peer.ask(TakeOver(step=step), TookOver).version
        self.trained: list[tuple[float, int, int]] = []  # (monotonic, trajectories, bytes) so far
        self._num_trained = 0
        self._fetched_bytes = 0
        self._sizes: dict[int, int] = {}  # step -> trajectories of its batch
        self._missing: dict[int, int] = {}  # step -> payloads that have not come yet
        self._fetches: dict[bytes, int] = {}  # request -> step
        self._requested: bytes | None = None
        self._committing = -1
        self._request()

    def _request(self) -> None:
        """Ask for the first batch that is not here, of this step and the next one."""
        step = self.version.step
        if step in self._sizes:
            step += 1
        if step in self._sizes:
            return
        if self._requested is not None:
            self.peer.may_refuse.add(self._requested)  # for a version that is over
        self._requested = self.peer.send(
            RequestBatch(version=self.version, step=step, wait_s=WAIT_S)
        )

    def listen(self) -> bool:
        """Take answers; True when the version has changed."""
        before = self.version
        while (received := self.peer.receive(0.0)) is not None:
            request_id, answer, frames = received
            match answer:
                case BatchDelivered(step=step, groups=groups) if step not in self._sizes:
                    keys = [
                        (t.header.group_id, t.header.sibling)
                        for g in groups
                        for t in g.trajectories
                    ]
                    if step >= self.version.step:
                        self._fetch(step, keys)
                        self._request()
                case BatchNotReady() if request_id == self._requested:
                    self._request()
                case Payloads():
                    self._missing[self._fetches.pop(request_id)] -= len(frames)
                    self._fetched_bytes += sum(len(frame) for frame in frames)
                    self._commit()
                case StepCommitted():
                    self._committed()
                case _:
                    pass
        return self.version != before

    def _fetch(self, step: int, keys: list[tuple[int, int]]) -> None:
        self._sizes[step] = self._missing[step] = len(keys)
        for start in range(0, len(keys), _KEYS_PER_FETCH):
            wanted = FetchPayloads(keys=tuple(keys[start : start + _KEYS_PER_FETCH]))
            self._fetches[self.peer.send(wanted)] = step

    def _commit(self) -> None:
        step = self.version.step
        if self._committing < step and self._missing.get(step) == 0:
            self._committing = step
            self.peer.send(StepCommit(version=self.version.next(), metrics={}))

    def _committed(self) -> None:
        step = self.version.step
        del self._missing[step]
        self._num_trained += self._sizes.pop(step)
        self.version = self.version.next()
        self.trained.append((time.monotonic(), self._num_trained, self._fetched_bytes))
        if self._seal_every and (step + 1) % self._seal_every == 0:
            seal = SealSteps(version=self.version, step=step + 1, oldest_kept=step + 1)
            self.peer.send(seal)
        self._request()
        self._commit()


def generate(
    endpoint: str,
    payload_bytes: int,
    version: SharedNumber,
    stop: SharedNumber,
    limit: int,
    name: str,
) -> int:
    """Generate until stopped, or until ``limit`` trajectories (0: none) are acknowledged."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    peer = Peer(context, endpoint, "generator", name)
    it = Generator(peer, trajectory_bytes(payload_bytes))
    while not stop.value and not (limit and it.acked >= limit):
        if version.value and not (limit and it.leased >= limit):
            it.lease(unpack(version.value))
        it.submit()
        it.listen(POLL_S)
    peer.close()
    return it.acked


def consume(
    endpoint: str,
    version: SharedNumber,
    stop: SharedNumber,
    steps: int,
    score_limit: int,
    seal_every: int,
    first_step: int = 0,
) -> list[tuple[float, int, int]]:
    """Score, and train; return (time, trajectories, bytes) after each step.

    Args:
        endpoint: of the broker.
        version: the learner's, for the generators.
        stop: not 0 ends it.
        steps: to train; 0 is until stopped, -1 trains nothing.
        score_limit: scores to give before it ends by itself.
        seal_every: steps from one durable checkpoint to the next; 0 makes none.
        first_step: where the learner resumes.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    scorer = Scorer(Peer(context, endpoint, "reward_worker", "reward-worker-0"))
    peers = [scorer.peer]
    learner = None
    if steps >= 0:
        peer = Peer(context, endpoint, "learner", "learner")
        learner = Learner(peer, step=first_step, seal_every=seal_every)
        peers.append(learner.peer)
        version.value = pack(learner.version)
    poller = zmq.Poller()
    for peer in peers:
        poller.register(peer.socket, zmq.POLLIN)
    trains = learner is not None
    while not stop.value and (trains or scorer.scored < score_limit):
        poller.poll(50)
        scorer.listen()
        if learner is not None and trains and learner.listen():
            version.value = pack(learner.version)
            trains = not steps or learner.version.step < first_step + steps
            if not trains:
                poller.unregister(learner.peer.socket)
    for peer in peers:
        peer.close()
    return learner.trained if learner else []
