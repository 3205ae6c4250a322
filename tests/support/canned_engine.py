"""An engine that answers with what it was given, and such answers."""

from collections.abc import Sequence
from pathlib import Path

from slipstream.generators.engine import Completion, EngineLoad, SamplingParams
from slipstream.weightbus.agent.engine import Adoption
from slipstream.wire.messages.manifest import Bucket
from slipstream.wire.messages.versions import PolicyVersion

FIRST = PolicyVersion(1, 3)  # of a completion that names none


class CannedEngine:
    """Answers with what it was given; has no weights."""

    def __init__(self, *completions: Completion) -> None:
        self.completions = list(completions)
        self.asked: list[tuple[list[int], SamplingParams, int, list[int]]] = []
        self.ended_sessions: list[str] = []

    async def sample(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        count: int,
        seeds: Sequence[int] = (),
    ) -> list[Completion]:
        self.asked.append((prompt_ids, params, count, list(seeds)))
        return self.answers(count)

    def answers(self, _count: int) -> list[Completion]:
        """Return the answers to the newest request."""
        return self.completions

    def end_session(self, session: str) -> None:
        self.ended_sessions.append(session)

    async def open_group(self, **settings: object) -> None: ...
    async def close_group(self, group_name: str) -> None: ...
    async def pause(self) -> int:
        return 0

    async def begin_update(self) -> None: ...
    async def load_bucket(self, bucket: Bucket, *, group_name: str, last: bool) -> None: ...
    async def end_update(self) -> None: ...
    async def load_folder(self, folder: Path) -> None: ...
    async def checksums(self) -> dict[str, str]:
        return {}

    async def label(self, version: PolicyVersion) -> None: ...
    async def resume(self) -> None: ...

    async def stage_folder(self, folder: Path, version: PolicyVersion) -> dict[str, float]:
        del folder, version
        return {}

    async def adopt_folder(self, folder: Path, version: PolicyVersion, *, digest: str) -> Adoption:
        del folder, version, digest
        return Adoption(0, {})

    async def pause_for_update(self) -> int:
        return 0

    async def finish_update(self, version: PolicyVersion, *, digest: str) -> dict[str, str]:
        del version, digest
        return {}

    async def load(self) -> EngineLoad:
        return EngineLoad(
            num_running=0, num_waiting=0, used_tokens=0, capacity_tokens=1, num_retractions=0
        )


def completion(*ids: int, starts: list[tuple[int, PolicyVersion]] | None = None) -> Completion:
    return Completion(
        token_ids=list(ids),
        logprobs=[-0.25 * (i + 1) for i in range(len(ids))],
        version_starts=starts or [(0, FIRST)],
        finish_reason="stop",
    )
