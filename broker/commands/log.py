"""The durable log of commands: every promise to a tenant is a row on disk before it is made.

One SQLite file has all state; a method is one transaction, so a process that is killed between two
calls has lost nothing and done nothing twice. Only the turns of tenants, and
the lives of learners, are in memory alone. The
clock comes in as a parameter.

A model's commands are numbered without a gap from 0, which makes it. They are carried out in this
order, and a model's durable state says which one it holds last (``applied``): after a learner's
death what follows is handed out again, a forward-backward with an outcome for its gradient alone.
"""

import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Literal

import msgspec

from slipstream.broker.commands.refusals import RequestRefusedError
from slipstream.wire.messages.codec import decode_outcome, decode_sample, encode
from slipstream.wire.messages.commands import CommandFailed, LoraSpec, Outcome, Sampled, Saved
from slipstream.wire.settings.serve import ServeSection

Kind = Literal["create", "forward", "backward", "step", "save", "sample"]
MOST_LIVES = 8  # learners that may end by one command
GRACE_S = 600.0  # a fetched result is kept for so long: its answer may not have arrived
_SCHEMA = """
CREATE TABLE IF NOT EXISTS served (one INTEGER PRIMARY KEY CHECK (one = 1), model TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS sessions (
  id TEXT PRIMARY KEY, tenant TEXT NOT NULL, key TEXT NOT NULL, info BLOB NOT NULL,
  made REAL NOT NULL, seen REAL NOT NULL, ended TEXT NOT NULL DEFAULT '',
  UNIQUE (tenant, key)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS models (
  id TEXT PRIMARY KEY, tenant TEXT NOT NULL, session TEXT NOT NULL, spec BLOB NOT NULL,
  made REAL NOT NULL, seen REAL NOT NULL, applied INTEGER NOT NULL DEFAULT -1,
  ended TEXT NOT NULL DEFAULT '') WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS samplers (
  id TEXT PRIMARY KEY, tenant TEXT NOT NULL, session TEXT NOT NULL, version TEXT NOT NULL,
  path TEXT NOT NULL, seen REAL NOT NULL, ended TEXT NOT NULL DEFAULT '',
  clones INTEGER NOT NULL DEFAULT 0) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS checkpoints (
  path TEXT PRIMARY KEY, tenant TEXT NOT NULL, model TEXT NOT NULL, kind TEXT NOT NULL,
  digest TEXT NOT NULL, size INTEGER NOT NULL, spec BLOB NOT NULL, made REAL NOT NULL,
  expires REAL, info BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS commands (
  no INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL,
  target TEXT NOT NULL, number INTEGER NOT NULL, kind TEXT NOT NULL, asked BLOB NOT NULL,
  body BLOB, details BLOB, bytes INTEGER NOT NULL, made REAL NOT NULL,
  outcome BLOB, failed INTEGER NOT NULL DEFAULT 0, done_no INTEGER, done REAL, fetched REAL,
  expired TEXT NOT NULL DEFAULT '',
  UNIQUE (target, number));
CREATE INDEX IF NOT EXISTS waiting ON commands (tenant, kind) WHERE done IS NULL;
CREATE INDEX IF NOT EXISTS held ON commands (tenant) WHERE bytes > 0;
CREATE INDEX IF NOT EXISTS finished ON commands (done) WHERE outcome IS NOT NULL;
CREATE INDEX IF NOT EXISTS in_order ON commands (done_no);
"""


class SaveDetails(msgspec.Struct, frozen=True, kw_only=True):
    """What becomes of saved weights: a checkpoint under a path, or the version of a sampler."""

    path: str = ""
    kind: Literal["training", "sampler"]
    overwrite: bool = True
    sampler: str = ""
    ttl_s: float | None = None
    info: dict[str, str] = {}


@dataclass(frozen=True, slots=True)
class Ask:
    """A command as a tenant sent it."""

    tenant: str
    target: str  # model, or sampler
    number: int
    kind: Kind
    asked: bytes  # hash of the request: a repetition is equal
    body: bytes
    details: SaveDetails | None = None


@dataclass(frozen=True, slots=True)
class Future:
    """A command as its tenant sees it."""

    id: str
    kind: Kind
    outcome: Outcome | None
    num_bytes: int
    details: SaveDetails | None
    target: str
    expired: str  # why its outcome is gone


@dataclass(frozen=True, slots=True)
class Next:
    """A command for a learner."""

    model: str
    number: int
    what: Literal["new", "again", "passed"]
    body: bytes


Row = sqlite3.Row


class CommandLog:
    """The log in a file. Use it from one thread at a time; one process has the file."""

    def __init__(self, path: Path | str, limits: ServeSection, *, now: float) -> None:
        """Open or make the file.

        Sessions are taken as seen now: they could not be while no server ran.
        """
        self._limits = limits
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._db.row_factory = sqlite3.Row
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=OFF"):
            self._db.execute(f"PRAGMA {pragma}")
        self._db.executescript(_SCHEMA)
        self._turns: dict[str, int] = {}  # tenant or model -> when the learner last served it
        self._sample_turns: dict[str, int] = {}  # tenant -> when an engine last did
        self._lives: dict[tuple[str, int], set[str]] = {}  # learners that were handed a command
        self._clock = count(1)
        with self._transaction() as db:
            db.execute("UPDATE sessions SET seen = ? WHERE ended = ''", (now,))

    def base_model(self, name: str) -> str:
        """Return the model whose adapters all of this is about: the first that was named."""
        self._db.execute("INSERT OR IGNORE INTO served VALUES (1, ?)", (name,))
        return str(self._db.execute("SELECT model FROM served").fetchone()[0])

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield self._db
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:  # a full disk ends some by itself
                self._db.execute("ROLLBACK")
            raise

    def _one(self, query: str, *values: object) -> Row | None:
        row: Row | None = self._db.execute(query, values).fetchone()
        return row

    def _number(self, query: str, *values: object) -> int:
        row = self._one(query, *values)
        return int(row[0] or 0) if row is not None else 0

    # ---- sessions ------------------------------------------------------------------------------

    def open_session(self, tenant: str, session: str, key: str, info: bytes, *, now: float) -> str:
        """Return a new session's id, or that of the request with this key which came before."""
        with self._transaction() as db:
            query = "SELECT id FROM sessions WHERE tenant = ? AND key = ?"
            if (row := self._one(query, tenant, key)) is not None:
                return str(row["id"])
            values = (session, tenant, key, info, now, now)
            db.execute("INSERT INTO sessions VALUES (?, ?, ?, ?, ?, ?, '')", values)
        return session

    def touch(self, tenant: str, session: str, *, now: float) -> None:
        """Note a sign of life.

        Raises:
            RequestRefusedError: there is no such session (404), or it has ended (410).
        """
        with self._transaction() as db:
            self._session(tenant, session)
            db.execute("UPDATE sessions SET seen = ? WHERE id = ?", (now, session))

    def _session(self, tenant: str, session: str) -> Row:
        row = self._one("SELECT * FROM sessions WHERE id = ? AND tenant = ?", session, tenant)
        if row is None:
            raise RequestRefusedError(404, f"there is no session {session}")
        if row["ended"]:
            raise RequestRefusedError(410, f"session {session} has ended: {row['ended']}")
        return row

    def session_info(self, tenant: str, session: str) -> tuple[bytes, list[str], list[str]]:
        """Return what a session was opened with, its models and its samplers."""
        row = self._one("SELECT * FROM sessions WHERE id = ? AND tenant = ?", session, tenant)
        if row is None:
            raise RequestRefusedError(404, f"there is no session {session}")
        models, samplers = (
            [r["id"] for r in self._db.execute(f"SELECT id FROM {t} WHERE session = ?", (session,))]  # noqa: S608 ours
            for t in ("models", "samplers")
        )
        return row["info"], models, samplers

    def end_session(self, tenant: str, session: str, reason: str, *, now: float) -> None:
        """End a session, its models and its samplers; does nothing to one that has ended."""
        with self._transaction() as db:
            db.execute(
                "UPDATE sessions SET ended = ? WHERE id = ? AND tenant = ? AND ended = ''",
                (reason, session, tenant),
            )
            for table in ("models", "samplers"):
                query = f"SELECT id FROM {table} WHERE session = ? AND tenant = ? AND ended = ''"  # noqa: S608 ours
                for row in db.execute(query, (session, tenant)).fetchall():
                    self._end(table, row["id"], reason, now=now)

    def _end(self, table: str, target: str, reason: str, *, now: float) -> None:
        self._db.execute(f"UPDATE {table} SET ended = ? WHERE id = ?", (reason, target))  # noqa: S608 ours
        query = "SELECT no FROM commands WHERE target = ? AND done IS NULL"
        for row in self._db.execute(query, (target,)).fetchall():
            self._finish(row["no"], CommandFailed(reason=reason, category="user"), now=now)
        self._db.execute(
            "UPDATE commands SET body = NULL, bytes ="
            " iif(fetched IS NULL, coalesce(length(outcome), 0), 0)"
            " WHERE target = ? AND body IS NOT NULL",
            (target,),
        )

    # ---- commands of tenants -------------------------------------------------------------------

    def make_model(self, ask: Ask, session: str, spec: LoraSpec, *, now: float) -> str:
        """Accept the command that makes a model; return its future.

        Raises:
            RequestRefusedError: the tenant has no such session, or a quota is full.
        """
        with self._transaction() as db:
            if (known := self._known(ask)) is not None:
                return known
            self._session(ask.tenant, session)
            own = "SELECT count(*) FROM models WHERE tenant = ? AND ended = ''"
            if (most := self._limits.max_models) <= self._number(own, ask.tenant):
                raise RequestRefusedError(
                    429, f"{most} models are there already (serve.max_models): unload some"
                )
            self._refuse_full(ask)
            values = (ask.target, ask.tenant, session, msgspec.msgpack.encode(spec), now, now)
            db.execute(
                "INSERT INTO models (id, tenant, session, spec, made, seen)"
                " VALUES (?, ?, ?, ?, ?, ?)",
                values,
            )
            return self._insert(ask, now=now)

    def accept(self, ask: Ask, *, now: float) -> str:
        """Accept a command of a model or sampler; return its future.

        A repetition returns the future of the first.

        Raises:
            RequestRefusedError: the tenant has no such model or sampler, another command has the
                number, or a quota is full. Or a checkpoint has the name: the number is used up.
        """
        reason = ""
        with self._transaction() as db:
            if (known := self._known(ask)) is not None:
                return known
            self._refuse_full(ask)
            if ask.details is not None:
                self._refuse_save(ask.tenant, ask.details)
                reason = self._name_taken(ask.details)
            table = "samplers" if ask.kind == "sample" else "models"
            db.execute(f"UPDATE {table} SET seen = ? WHERE id = ?", (now, ask.target))  # noqa: S608 ours
            self._insert(ask, reason, now=now)
        if reason:
            raise RequestRefusedError(400, reason)
        return _id(ask)

    def refuse(self, ask: Ask, reason: str, *, now: float) -> None:
        """Give a refused command its place in the order, so that those behind it are carried out.

        Nothing happens where the number is taken, or the tenant has no such model.
        """
        with self._transaction():
            try:
                known = self._known(ask)
            except RequestRefusedError:
                return
            if known is None:
                self._insert(ask, reason, now=now)

    def _known(self, ask: Ask) -> str | None:
        """Return the future of an equal command that is there already."""
        row = self._one(
            "SELECT asked FROM commands WHERE id = ? AND tenant = ?", _id(ask), ask.tenant
        )
        if row is not None and row["asked"] != ask.asked:
            raise RequestRefusedError(
                400, f"{_id(ask)} was another request before: a number names one command"
            )
        if row is not None:
            return _id(ask)
        if ask.number > 0 or ask.kind == "sample":
            self._target(ask)
        return None

    def _target(self, ask: Ask) -> None:
        table, what = ("samplers", "sampler") if ask.kind == "sample" else ("models", "model")
        row = self._one(
            f"SELECT ended FROM {table} WHERE id = ? AND tenant = ?",  # noqa: S608 ours
            ask.target,
            ask.tenant,
        )
        if row is None:
            raise RequestRefusedError(404, f"there is no {what} {ask.target}")
        if row["ended"]:
            raise RequestRefusedError(410, f"{ask.target} has ended: {row['ended']}")

    def _refuse_full(self, ask: Ask) -> None:
        limits, is_sample = self._limits, ask.kind == "sample"
        waiting = self._number(
            "SELECT count(*) FROM commands WHERE tenant = ? AND done IS NULL AND (kind = 'sample')"
            " = ?",
            ask.tenant,
            is_sample,
        )
        most = limits.max_samples if is_sample else limits.max_commands
        if waiting >= most:
            what = "samples (serve.max_samples)" if is_sample else "commands (serve.max_commands)"
            raise RequestRefusedError(429, f"{waiting} {what} wait: come again when some are done")
        held = self._number(
            "SELECT sum(bytes) FROM commands WHERE tenant = ? AND bytes > 0", ask.tenant
        )
        if held + len(ask.body) > limits.max_bytes:
            raise RequestRefusedError(
                429,
                f"{held} bytes of commands and of results to be fetched are kept, and this one has "
                f"{len(ask.body)}: there may be {limits.max_bytes} (serve.max_bytes)",
            )

    def _refuse_save(self, tenant: str, details: SaveDetails) -> None:
        if not details.path:
            return
        waiting = (
            "SELECT count(*) FROM commands WHERE tenant = ? AND done IS NULL AND kind = 'save'"
        )
        kept = "SELECT count(*) FROM checkpoints WHERE tenant = ?"
        most = self._limits.max_checkpoints
        if self._number(kept, tenant) + self._number(waiting, tenant) >= most:
            raise RequestRefusedError(
                429, f"{most} checkpoints are kept (serve.max_checkpoints): delete some"
            )

    def _name_taken(self, details: SaveDetails) -> str:
        """Return why weights cannot be saved under a name; empty if they can."""
        known = self._one("SELECT 1 FROM checkpoints WHERE path = ?", details.path)
        is_free = known is None or details.overwrite
        return "" if is_free else f"{details.path} is there already: overwrite it, or delete it"

    def _insert(self, ask: Ask, refused: str = "", *, now: float) -> str:
        """Add a command, with its outcome if it is refused; return its future."""
        details = None if ask.details is None else msgspec.msgpack.encode(ask.details)
        self._db.execute(
            "INSERT INTO commands (id, tenant, target, number, kind, asked, body, details, bytes,"
            " made) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *(_id(ask), ask.tenant, ask.target, ask.number, ask.kind, ask.asked),
                *(ask.body, details, len(ask.body), now),
            ),
        )
        if refused:
            no = self._number("SELECT no FROM commands WHERE id = ?", _id(ask))
            self._finish(no, CommandFailed(reason=refused, category="user"), now=now)
        return _id(ask)

    # ---- futures -------------------------------------------------------------------------------

    def future(self, tenant: str, request: str) -> Future:
        """Return a command as its tenant sees it.

        Raises:
            RequestRefusedError: there is no such command of the tenant's.
        """
        row = self._one("SELECT * FROM commands WHERE id = ? AND tenant = ?", request, tenant)
        if row is None:
            raise RequestRefusedError(404, f"there is no request {request}")
        data, details = row["outcome"], row["details"]
        return Future(
            id=request,
            kind=row["kind"],
            outcome=None if data is None else decode_outcome(data),
            num_bytes=len(data or b""),
            details=None if details is None else msgspec.msgpack.decode(details, type=SaveDetails),
            target=row["target"],
            expired=row["expired"],
        )

    def fetched(self, tenant: str, requests: Iterable[str], *, now: float) -> None:
        """Note that results were fetched: they count no more, and are kept for a while only."""
        with self._transaction() as db:
            for request in requests:
                db.execute(
                    "UPDATE commands SET fetched = coalesce(fetched, ?),"
                    " bytes = coalesce(length(body), 0)"
                    " WHERE id = ? AND tenant = ? AND outcome IS NOT NULL",
                    (now, request, tenant),
                )

    def cancel(self, tenant: str, request: str, *, now: float) -> None:
        """End a sample that is not wanted any more."""
        with self._transaction():
            row = self._one(
                "SELECT no FROM commands WHERE id = ? AND tenant = ? AND kind = 'sample'"
                " AND done IS NULL",
                request,
                tenant,
            )
            if row is not None:
                self._finish(row["no"], CommandFailed(reason="cancelled", category="user"), now=now)

    def completions(
        self, tenant: str, sampler: str, clone: int, cursor: int, *, block: int
    ) -> list[tuple[int, str, bool, int]]:
        """Return (place, future, failed, bytes) of the samples that ended behind a place.

        ``block`` numbers belong to each clone of the sampler.
        """
        rows = self._db.execute(
            "SELECT id, done_no, outcome IS NULL OR failed AS failed,"
            " coalesce(length(outcome), 0) AS size FROM commands WHERE target = ? AND tenant = ?"
            " AND number >= ? AND number < ? AND done_no > ? ORDER BY done_no LIMIT 1000",
            (sampler, tenant, clone * block, (clone + 1) * block, cursor),
        )
        return [(row["done_no"], row["id"], bool(row["failed"]), row["size"]) for row in rows]

    # ---- models, samplers, checkpoints ---------------------------------------------------------

    def model(self, tenant: str, model: str) -> tuple[Row, LoraSpec]:
        """Return a model of the tenant's, ended or not."""
        row = self._one("SELECT * FROM models WHERE id = ? AND tenant = ?", model, tenant)
        if row is None:
            raise RequestRefusedError(404, f"there is no model {model}")
        return row, msgspec.msgpack.decode(row["spec"], type=LoraSpec)

    def models(self, tenant: str) -> list[Row]:
        """Return the models of a tenant, the newest first."""
        query = "SELECT * FROM models WHERE tenant = ? ORDER BY made DESC"
        return self._db.execute(query, (tenant,)).fetchall()

    def unload(self, tenant: str, model: str, *, now: float) -> None:
        """End a model: commands that wait fail; its checkpoints stay."""
        with self._transaction():
            row, _ = self.model(tenant, model)
            if not row["ended"]:
                self._end("models", model, "it was unloaded", now=now)

    def open_sampler(
        self, tenant: str, session: str, sampler: str, path: str, *, now: float
    ) -> None:
        """Make a sampler of a version, or of the base model with an empty path.

        Raises:
            RequestRefusedError: the tenant has no such session or path.
        """
        with self._transaction() as db:
            self._session(tenant, session)
            version = self._checkpoint(tenant, path, "sampler", now=now)["digest"] if path else ""
            known = self._one("SELECT * FROM samplers WHERE id = ?", sampler)
            if known is not None and known["path"] != path:
                raise RequestRefusedError(400, f"{sampler} was another request before")
            db.execute(
                "INSERT OR IGNORE INTO samplers VALUES (?, ?, ?, ?, ?, ?, '', 0)",
                (sampler, tenant, session, version, path, now),
            )
            self._end_old_versions(tenant, now=now)

    def sampler(self, tenant: str, sampler: str) -> Row:
        """Return a sampler of the tenant's."""
        row = self._one("SELECT * FROM samplers WHERE id = ? AND tenant = ?", sampler, tenant)
        if row is None:
            raise RequestRefusedError(404, f"there is no sampler {sampler}")
        return row

    def join_sampler(self, tenant: str, sampler: str) -> int:
        """Return a number for one more client of a sampler, from 1."""
        with self._transaction() as db:
            row = self.sampler(tenant, sampler)
            db.execute("UPDATE samplers SET clones = clones + 1 WHERE id = ?", (sampler,))
            return int(row["clones"]) + 1

    def checkpoint(
        self, tenant: str, path: str, kind: str = "", *, now: float
    ) -> tuple[Row, LoraSpec]:
        """Return a checkpoint of the tenant's; ``kind`` is the one that is wanted.

        Raises:
            RequestRefusedError: the tenant has no such checkpoint.
        """
        row = self._checkpoint(tenant, path, kind, now=now)
        return row, msgspec.msgpack.decode(row["spec"], type=LoraSpec)

    def _checkpoint(self, tenant: str, path: str, kind: str, *, now: float) -> Row:
        row = self._one("SELECT * FROM checkpoints WHERE path = ? AND tenant = ?", path, tenant)
        if row is None or (row["expires"] is not None and row["expires"] < now):
            raise RequestRefusedError(404, f"there are no weights {path}")
        if kind and row["kind"] != kind:
            raise RequestRefusedError(400, f"{path} is a {row['kind']} checkpoint, not {kind}")
        return row

    def checkpoints(self, tenant: str, model: str = "") -> list[Row]:
        """Return the checkpoints of a tenant, or of one model, the newest first."""
        query = "SELECT * FROM checkpoints WHERE tenant = ? AND ? IN ('', model) ORDER BY made DESC"
        return self._db.execute(query, (tenant, model)).fetchall()

    def delete_checkpoint(self, tenant: str, path: str, *, now: float) -> None:
        """Forget a checkpoint; its files go when nothing else has the same content."""
        with self._transaction() as db:
            self._checkpoint(tenant, path, "", now=now)
            db.execute("DELETE FROM checkpoints WHERE path = ?", (path,))

    def set_ttl(self, tenant: str, path: str, ttl_s: float | None, *, now: float) -> None:
        """Let a checkpoint expire some time from now; None is never."""
        with self._transaction() as db:
            self._checkpoint(tenant, path, "", now=now)
            expires = None if ttl_s is None else now + ttl_s
            db.execute("UPDATE checkpoints SET expires = ? WHERE path = ?", (expires, path))

    # ---- the learner ---------------------------------------------------------------------------

    @property
    def live_models(self) -> tuple[str, ...]:
        """Models that have not ended."""
        rows = self._db.execute("SELECT id FROM models WHERE ended = ''")
        return tuple(row["id"] for row in rows)

    def next_command(self, at: Mapping[str, int], *, life: str = "", now: float) -> Next | None:
        """Return the next command of the tenant that waited longest; None if nothing is to do.

        A model whose state is older than what it held before ends: its state was lost. So does one
        whose command ends learner after learner.

        Args:
            at: Last command that each model of the learner has carried out.
            life: Name of this learner; another one after each start.
            now: The time.
        """
        self._lives = {
            (model, number): lives
            for (model, number), lives in self._lives.items()
            if at.get(model, -1) < number  # what a learner has lived through counts no more
        }
        query = "SELECT id, tenant, applied FROM models WHERE ended = ''"
        rows = self._db.execute(query).fetchall()
        for row in sorted(rows, key=self._turn):
            number = at.get(row["id"], -1) + 1
            if number <= row["applied"]:
                with self._transaction():
                    self._end("models", row["id"], "the learner lost its state", now=now)
                continue
            found = self._one(
                "SELECT kind, body, outcome, done FROM commands WHERE target = ? AND number = ?",
                row["id"],
                number,
            )
            if found is None:
                continue
            self._turns[row["tenant"]] = self._turns[row["id"]] = next(self._clock)
            lives = self._lives.setdefault((row["id"], number), set())
            lives.add(life)
            if len(lives) > MOST_LIVES:
                reason = f"the learner ended {MOST_LIVES} times while it carried out {number}"
                with self._transaction():
                    self._end("models", row["id"], reason, now=now)
                continue
            if found["done"] is None:
                return Next(row["id"], number, "new", found["body"])
            if found["kind"] == "backward" and found["body"] is not None:
                return Next(row["id"], number, "again", found["body"])
            return Next(row["id"], number, "passed", b"")
        return None

    def _turn(self, model: Row) -> tuple[int, int]:
        """Return when a model's tenant was last served, and when it was."""
        return self._turns.get(model["tenant"], 0), self._turns.get(model["id"], 0)

    def report(
        self, model: str, number: int, outcome: Outcome, *, applied: int, now: float
    ) -> None:
        """Record the outcome of a model's command; the first one counts.

        Commands up to ``applied``, the last in the model's durable state, are not handed out again.
        """
        with self._transaction() as db:
            row = self._one("SELECT * FROM commands WHERE target = ? AND number = ?", model, number)
            if row is None:
                return
            if row["done"] is None:
                self._finish(row["no"], outcome, now=now)
                if number == 0 and isinstance(outcome, CommandFailed):
                    self._end("models", model, outcome.reason, now=now)
            db.execute("UPDATE models SET applied = max(applied, ?) WHERE id = ?", (applied, model))
            db.execute(
                "UPDATE commands SET body = NULL, bytes = bytes - length(body) WHERE target = ?"
                " AND number <= ? AND body IS NOT NULL AND done IS NOT NULL",
                (model, applied),
            )

    # ---- engines -------------------------------------------------------------------------------

    def waiting_samples(self, taken: Iterable[str], room: int) -> list[tuple[str, bytes]]:
        """Return samples that no generator has, the tenants in turns. (future, body).

        They have ``room`` answers together; the last one may have more.
        """
        rows = self._db.execute(
            "SELECT no, id, tenant, row_number() OVER (PARTITION BY tenant ORDER BY no) AS place"
            " FROM commands WHERE done IS NULL AND kind = 'sample' ORDER BY no"
        ).fetchall()
        known, found = set(taken), list[tuple[str, bytes]]()
        turns = dict(self._sample_turns)
        for row in sorted(rows, key=lambda row: (row["place"], turns.get(row["tenant"], 0))):
            if room <= 0:
                break
            if row["id"] in known:
                continue
            waiting = self._one("SELECT body FROM commands WHERE no = ?", row["no"])
            if waiting is not None:
                room -= decode_sample(waiting["body"]).count
                found.append((row["id"], waiting["body"]))
                self._sample_turns[row["tenant"]] = next(self._clock)
        return found

    def is_waiting(self, request: str) -> bool:
        """True if a command has no outcome yet."""
        query = "SELECT 1 FROM commands WHERE id = ? AND done IS NULL"
        return self._one(query, request) is not None

    def report_sample(self, request: str, outcome: Outcome, *, now: float) -> None:
        """Record a sample; the first one counts.

        Raises:
            ValueError: it was made by another version than was asked for.
        """
        with self._transaction():
            query = "SELECT no, body FROM commands WHERE id = ? AND done IS NULL"
            row = self._one(query, request)
            if row is None:
                return
            asked = decode_sample(row["body"])
            if isinstance(outcome, Sampled) and outcome.version != asked.version:
                raise ValueError(f"{request} is of {outcome.version}, not of {asked.version}")
            self._finish(row["no"], outcome, now=now)

    # ---- ends ----------------------------------------------------------------------------------

    def _finish(self, no: int, outcome: Outcome, *, now: float) -> None:
        data = encode(outcome)
        row = self._one("SELECT * FROM commands WHERE no = ?", no)
        if row is None:
            return
        failed = isinstance(outcome, CommandFailed)
        keeps_body = row["kind"] == "backward" and not failed
        size = len(data) + (len(row["body"] or b"") if keeps_body else 0)
        self._db.execute(
            "UPDATE commands SET outcome = ?, failed = ?, done = ?, bytes = ?,"
            " body = iif(?, body, NULL),"
            " done_no = (SELECT coalesce(max(done_no), 0) + 1 FROM commands) WHERE no = ?",
            (data, failed, now, size, keeps_body, no),
        )
        if isinstance(outcome, Saved) and row["details"] is not None:
            details = msgspec.msgpack.decode(row["details"], type=SaveDetails)
            self._saved(row, details, outcome, now=now)

    def _saved(self, row: Row, details: SaveDetails, saved: Saved, *, now: float) -> None:
        model = self._one("SELECT * FROM models WHERE id = ?", row["target"])
        if model is None:
            return
        if details.path:
            expires = None if details.ttl_s is None else now + details.ttl_s
            values = (details.path, row["tenant"], row["target"], details.kind, saved.digest)
            rest = (saved.num_bytes, model["spec"], now, expires)
            info = (msgspec.msgpack.encode(details.info),)
            self._db.execute(
                "INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                values + rest + info,
            )
        if details.sampler:
            self._db.execute(
                "INSERT OR IGNORE INTO samplers VALUES (?, ?, ?, ?, '', ?, '', 0)",
                (details.sampler, row["tenant"], model["session"], saved.digest, now),
            )
            self._end_old_versions(row["tenant"], now=now)

    def _end_old_versions(self, tenant: str, *, now: float) -> None:
        """End samplers of versions that no checkpoint has, beyond the most recently used ones."""
        most = self._limits.max_checkpoints
        old = self._db.execute(
            "SELECT id FROM samplers WHERE tenant = ?1 AND ended = '' AND version IN (SELECT"
            " version FROM samplers WHERE tenant = ?1 AND ended = '' AND version != '' AND version"
            " NOT IN (SELECT digest FROM checkpoints) GROUP BY version"
            " ORDER BY max(seen) DESC LIMIT -1 OFFSET ?2)",
            (tenant, most),
        ).fetchall()
        for row in old:
            reason = f"{most} other versions were sampled from later (serve.max_checkpoints)"
            self._end("samplers", row["id"], reason, now=now)

    def expire(self, *, now: float) -> bool:
        """Forget what is not wanted any more: old results, silent sessions, old checkpoints.

        Returns:
            True if commands that wait have failed.
        """
        limits = self._limits
        silent = self._db.execute(
            "SELECT id, tenant FROM sessions WHERE ended = '' AND seen < ?",
            (now - limits.session_s,),
        ).fetchall()
        for row in silent:
            reason = f"its session gave no sign of life for {limits.session_s:g} s"
            self.end_session(row["tenant"], row["id"], reason, now=now)
        with self._transaction() as db:
            db.execute(
                "UPDATE commands SET outcome = NULL, bytes = coalesce(length(body), 0), expired ="
                " iif(fetched IS NULL, ?, ?) WHERE outcome IS NOT NULL AND"
                " (fetched < ? OR done < ?)",
                (
                    f"its result was not fetched for {limits.keep_s:g} s (serve.keep_s)",
                    f"its result was fetched more than {GRACE_S:g} s ago",
                    now - GRACE_S,
                    now - limits.keep_s,
                ),
            )
            db.execute("DELETE FROM checkpoints WHERE expires < ?", (now,))
            gone = now - limits.keep_s - limits.session_s
            for table in ("models", "samplers"):
                db.execute(
                    "DELETE FROM commands WHERE outcome IS NULL AND done < ? AND target IN"  # noqa: S608 ours
                    f" (SELECT id FROM {table} WHERE ended != '')",
                    (gone,),
                )
        return bool(silent)

    def used_digests(self) -> set[str]:
        """Return the digests of weights that something may still ask for."""
        rows = self._db.execute(
            "SELECT digest FROM checkpoints UNION SELECT version FROM samplers WHERE ended = ''"
        )
        return {row[0] for row in rows}


def _id(ask: Ask) -> str:
    return f"{ask.target}:{ask.number}"
