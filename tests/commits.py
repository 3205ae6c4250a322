"""Whether commit messages can be searched: ``python -m tests.commits [RANGE | --message FILE]``.

A subject is ``package: imperative``; anything but a small change has a body that gives the reason.
Without a range it checks every commit after the one that brought this file.
"""

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
AREAS = (
    *("wire", "algos", "broker", "weightbus", "generators", "learner", "deploy"),
    *("tests", "benchmarks", "docs", "configs", "build", "ci", "all"),
)
_AREA = rf"(?:{'|'.join(AREAS)})"
SUBJECT = re.compile(rf"{_AREA}(?:, {_AREA})*: (?P<text>\S.*)")
MAX_SUBJECT = 90
SMALL_CHANGE = 30  # lines added and removed
NO_IMPERATIVE = re.compile(
    r"(?:a|an|the|this|that|it|there|what|who|no|\w+ed|\w+ing)\b", re.IGNORECASE
)
VERBS = ("embed", "feed", "need", "shed", "speed", "bring", "sing")


@dataclass(frozen=True)
class Commit:
    """One commit that is no merge."""

    name: str  # abbreviated hash
    subject: str
    body: str
    num_lines: int  # added and removed


def faults_of(commit: Commit) -> list[str]:
    """Return what a commit message lacks."""
    faults = []
    found = SUBJECT.fullmatch(commit.subject)
    if found is None:
        faults.append(f"a subject is `package: imperative`, packages are {', '.join(AREAS)}")
    else:
        text = found["text"]
        first = text.split()[0]
        if first[0].isupper() and not first.isupper():
            faults.append("after the package, a lower-case verb follows")
        if first.lower() not in VERBS and NO_IMPERATIVE.match(first):
            faults.append(f"{first!r} is no verb in the imperative")
        if text.endswith("."):
            faults.append("a subject ends without a full stop")
    if len(commit.subject) > MAX_SUBJECT:
        faults.append(f"a subject of {len(commit.subject)} characters; {MAX_SUBJECT} are the most")
    if commit.num_lines > SMALL_CHANGE and not commit.body.strip():
        faults.append(f"{commit.num_lines} changed lines and no body with the reason")
    return faults


def commits_in(span: str) -> list[Commit]:
    """Return the commits of a range, merges left out."""
    form = "--format=%x01%h%x02%s%x02%b%x02"
    log = _git("log", "--no-merges", "--numstat", form, span)
    return [_parsed(record) for record in log.split("\x01")[1:]]


def being_made(message: str, changes: str) -> Commit:
    """Return the commit of a message as git hands it to a hook; its comments are left out."""
    lines = [line for line in message.splitlines() if not line.startswith("#")]
    subject, _, body = "\n".join(lines).strip().partition("\n")
    return _commit("this commit", subject, body, changes)


def _parsed(record: str) -> Commit:
    name, subject, body, changes = record.split("\x02")
    return _commit(name, subject, body, changes)


def _commit(name: str, subject: str, body: str, changes: str) -> Commit:
    counts = [line.split("\t")[:2] for line in changes.splitlines() if "\t" in line]
    num_lines = sum(int(count) for pair in counts for count in pair if count.isdecimal())
    return Commit(name, subject, body, num_lines)


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


def _since_this_file() -> str:
    here = Path(__file__).relative_to(ROOT)
    found = _git("log", "--diff-filter=A", "--format=%H", "--", str(here)).split()
    return f"{found[-1]}..HEAD" if found else "HEAD..HEAD"


def main() -> int:
    """Print what commit messages lack."""
    if not (ROOT / ".git").exists():
        return 0  # an archive has no history
    faulty = 0
    match sys.argv[1:]:
        case ["--message", file]:  # of the commit that is being made
            commits = [
                being_made(Path(file).read_text("utf-8"), _git("diff", "--cached", "--numstat"))
            ]
        case [span]:
            commits = commits_in(span)
        case _:
            commits = commits_in(_since_this_file())
    for commit in commits:
        for fault in faults_of(commit):
            faulty += 1
            sys.stderr.write(f"{commit.name} {commit.subject!r}: {fault}\n")
    return 1 if faulty else 0


if __name__ == "__main__":
    raise SystemExit(main())
