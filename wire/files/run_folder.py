"""Names of files in a run folder, for their writers and readers."""

from pathlib import Path

from slipstream.wire.errors import ConfigError

IDENTITY = Path("identity.json")  # identity of the run; ids and epochs given out
NUM_EVENTS = Path("num_events")  # events that the store acknowledged, in all lives of the run
BROKER_LOCK = Path("broker.lock")  # held by the one broker of the run
LEARNER_LOCK = Path("learner.lock")  # held by the one learner of a command server
BATCHES = Path("rollouts") / "batches.trajectories"
TRAINED = Path("rollouts") / "trained.jsonl"
EVAL = Path("eval")
IMAGES = Path("images")  # images of prompts and observations, a file each
SETTINGS = Path("resolved.toml")  # all of them, as at the run's start
RUN_LOCK = Path("run.lock")  # held by the supervisor of the run
SUMMARY = Path("summary.json")
METRICS = Path("metrics.jsonl")  # figures, a line per learner step and per evaluation
TRAIL = Path("ledger")  # events of every item
PAGE_STATE = Path("dashboard") / "state.msgpack"  # content of the page
PAGE_TOKEN = Path("dashboard") / "token"  # admits to the page; survives restarts of the broker
PAGE_PORT = Path("dashboard") / "port"  # port of the page, chosen by the system
PAGE_ADDRESS = Path("dashboard.url")  # address of the page, while a broker serves it
HOSTS_KEY = Path("hosts") / "key"  # proved by the hosts of a learner to each other, while it runs
DEAD_LETTERS = TRAIL / "dead_letters.json"  # those there are, replaced at each change
ACCOUNT = TRAIL / "account.json"  # account of all items at the newest learner step


def answers_file(run_folder: Path, step: int) -> Path:
    """Return the file with the answers of the evaluation of a step."""
    return run_folder / EVAL / f"step-{step:06d}.jsonl"


def answers_files(run_folder: Path) -> dict[int, Path]:
    """Return the existing files of answers, by step, in order."""
    files = (run_folder / EVAL).glob("step-*.jsonl")
    steps = {path.stem.removeprefix("step-"): path for path in files}
    return {int(step): steps[step] for step in sorted(steps) if step.isdecimal()}


def newest_run(runs: Path, holding: Path | str = SETTINGS) -> Path:
    """Return the run folder in which a file, or one of a pattern, was written last.

    Raises:
        ConfigError: no run has any.
    """
    files = list(runs.glob(f"*/{holding}"))
    if not files:
        raise ConfigError(f"no run in {runs.resolve()} has a {Path(holding).name}; name a run")
    newest = max(files, key=lambda path: path.stat().st_mtime)
    return runs / newest.relative_to(runs).parts[0]
