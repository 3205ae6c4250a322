"""Trajectories that the learner recorded, and the life of their groups, from the run folder."""

from collections import deque
from collections.abc import Iterable
from pathlib import Path

import msgspec

from slipstream.broker.dashboard.turn_spans import MAX_STRETCHES, drawn
from slipstream.broker.history.trajectories import (
    Found,
    Item,
    Letter,
    Sibling,
    TrainedRow,
    Trajectory,
)
from slipstream.broker.store.item_history import groups_at, trace_group
from slipstream.wire.files.run_folder import TRAIL, TRAINED
from slipstream.wire.messages.dead_letters import DeadLetter, Failure
from slipstream.wire.unreadable import UNREADABLE

MAX_INDEXED = 50_000  # the newest rows
MAX_FOUND = 50
_SHOWN_CHARS = 120
_SEARCHED_CHARS = 2_000  # characters of a prompt
_MAX_SEARCHED = 16_000_000  # characters of all prompts
MAX_PROMPT = 100_000  # characters of one that is shown
MAX_IMAGES = 64  # images of a trajectory that are shown


class _Indexed(msgspec.Struct, frozen=True):
    offset: int
    item: Item
    lags: frozenset[int]  # lags of its tokens
    searched: str  # lower case


_decoder = msgspec.json.Decoder(TrainedRow)


class RecordedItems:
    """Reads a run folder. Methods block; call them in one thread at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder  # folder of the run
        self._path = folder / TRAINED
        self._trail = folder / TRAIL
        self._index: deque[_Indexed] = deque()
        self._num_searched = 0  # characters in the index
        self._read = 0  # bytes of the file
        self._inode = 0

    def find(self, text: str = "", *, lag: int | None = None) -> Found:
        """Return the newest recorded trajectories that fit.

        Args:
            text: a group (``g17``), a position in the data (``17``) as `slipstream ledger trace`
                takes them, or a piece of the prompt; empty is all.
            lag: only those with tokens of this staleness, in learner steps.
        """
        self._refresh()
        wanted = text.strip().lower()
        groups: frozenset[int] | None = None  # the text is a piece of a prompt
        if wanted.isdecimal():
            groups = groups_at(self._trail, int(wanted))
        elif wanted[:1] == "g" and wanted[1:].isdecimal():
            groups = frozenset({int(wanted[1:])})
        found: list[Item] = []
        for entry in reversed(self._index):
            if lag is not None and lag not in entry.lags:
                continue
            fits = wanted in entry.searched if groups is None else entry.item.group_id in groups
            if not fits:
                continue
            if len(found) == MAX_FOUND:
                return Found(found, more=True, groups=sorted(groups or ()))
            found.append(entry.item)
        return Found(found, more=False, groups=sorted(groups or ()))

    def trajectory(self, group_id: int, sibling: int) -> Trajectory:
        """Return one recorded trajectory with the life of its group."""
        self._refresh()
        siblings = [entry for entry in self._index if entry.item.group_id == group_id]
        own = next((entry for entry in reversed(siblings) if entry.item.sibling == sibling), None)
        row = self._row(own.offset) if own is not None else None
        trace = trace_group(self._trail, group_id)
        life, outcome = (trace.life, trace.outcome) if trace is not None else ([], "")
        if row is None:
            return Trajectory(
                found=False,
                group_id=group_id,
                sibling=sibling,
                prompt=trace.prompt if trace is not None else "",
                life=life,
                outcome=outcome,
            )
        stretches, tokens = drawn(row)
        return Trajectory(
            found=True,
            step=row.step,
            group_id=group_id,
            sibling=sibling,
            prompt=row.prompt[:MAX_PROMPT],
            num_prompt_cut=max(0, len(row.prompt) - MAX_PROMPT),
            reward=row.reward,
            parts=row.parts,
            finish_reason=row.finish_reason,
            temperature=row.temperature,
            tokens=tokens,
            stretches=stretches[:MAX_STRETCHES],
            num_turns=len(row.chosen),
            num_branches=1 + len(row.branches),
            num_chosen=sum(count for _, count in row.chosen),
            num_cut=max(0, len(stretches) - MAX_STRETCHES),
            life=life,
            outcome=outcome,
            images=list(dict.fromkeys(image.digest for image in row.images))[:MAX_IMAGES],
            siblings=[
                Sibling(entry.item.sibling, entry.item.reward)
                for entry in sorted(siblings, key=lambda entry: entry.item.sibling)
            ],
        )

    def _row(self, offset: int) -> TrainedRow | None:
        try:
            with self._path.open("rb") as file:
                file.seek(offset)
                return _decoder.decode(file.readline())
        except (OSError, *UNREADABLE):
            return None

    def _refresh(self) -> None:
        """Read newly written rows; a file that was cut or replaced is read again."""
        try:
            stat = self._path.stat()
        except OSError:
            return  # nothing was recorded, or on another host
        if stat.st_ino != self._inode or stat.st_size < self._read:
            self._index.clear()
            self._num_searched = 0
            self._read, self._inode = 0, stat.st_ino
        with self._path.open("rb") as file:
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # it is being written
                self._add(line)
                self._read += len(line)

    def _add(self, line: bytes) -> None:
        try:
            row = _decoder.decode(line)
        except UNREADABLE:
            return
        lags = frozenset(row.step - run.step for run in row.version_runs)
        item = Item(
            step=row.step,
            group_id=row.group_id,
            sibling=row.sibling,
            lag=max(lags, default=0),
            reward=row.reward,
            prompt=row.prompt[:_SHOWN_CHARS],
            num_tokens=sum(count for _, count in row.chosen),
            num_turns=len(row.chosen),
            num_branches=1 + len(row.branches),
        )
        searched = row.prompt[:_SEARCHED_CHARS].lower()
        self._index.append(_Indexed(self._read, item, lags, searched))
        self._num_searched += len(searched)
        while len(self._index) > MAX_INDEXED or self._num_searched > _MAX_SEARCHED:
            self._num_searched -= len(self._index.popleft().searched)


def shown_letters(letters: Iterable[DeadLetter]) -> list[Letter]:
    """Return the newest dead letters as the page lists them, the newest first."""
    newest = sorted(letters, key=lambda letter: letter.group_id, reverse=True)[:MAX_FOUND]
    return [
        Letter(
            group_id=letter.group_id,
            reason=letter.reason,
            step=letter.step,
            prompt=letter.prompt.text[:_SHOWN_CHARS],
            failures=[_failure_text(failure) for failure in letter.failures],
        )
        for letter in newest
    ]


def _failure_text(failure: Failure) -> str:
    place = f"sibling {failure.sibling}" if failure.sibling >= 0 else "the missing ones"
    words = [place, failure.reason, failure.function, failure.by, failure.excerpt[:_SHOWN_CHARS]]
    return ", ".join(word for word in words if word)
