"""`start-reward-worker`: leases trajectories, scores them, answers."""

import argparse
import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from slipstream.broker.client import BrokerClient
from slipstream.broker.config import RewardSection, private_paths
from slipstream.broker.images import ImageFetcher, LocalImages
from slipstream.broker.listening.health_port import serving
from slipstream.broker.reward_worker.pool import RewardPool
from slipstream.broker.reward_worker.scorer import Scorer
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.keys import read_client_key
from slipstream.wire.messages.bounds import finite
from slipstream.wire.messages.broker import Done, Goodbye, RoleReport
from slipstream.wire.messages.status import REPORT_EVERY_S
from slipstream.wire.process.command_line import (
    add_health,
    load_arguments,
    log_settings,
    own_name,
    refuse_settings,
    role_parser,
    run_role,
)
from slipstream.wire.process.health import Health
from slipstream.wire.process.logs import start_logging
from slipstream.wire.process.run_until import running, unless
from slipstream.wire.process.stopping import stop_event
from slipstream.wire.process.usage import ProcessUsage
from slipstream.wire.settings.load import section
from slipstream.wire.settings.sections import RunSection, run_section

_log = logging.getLogger(__name__)
_DRAIN_S = 10.0  # time for scoring in progress when the worker is asked to end
_GOODBYE_S = 1.0


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """All that a reward worker reads."""

    run: RunSection
    reward: RewardSection
    function: str  # replaces reward.function; empty keeps it
    hidden: tuple[Path, ...]  # paths that a function must not see


async def serve(settings: WorkerSettings, name: str, health: Health | None = None) -> None:
    """Score for the broker until the run is over, or until SIGTERM or SIGINT.

    Probes see its ``health``.
    """
    stop = stop_event()
    health = health or Health()
    health.drains_when(stop.is_set)
    health.waits_for("its reward functions to load")
    run, reward = settings.run, settings.reward
    if run.key_file:
        read_client_key(Path(run.key_file))  # before anything that takes long
    pool = await RewardPool.start(reward, function=settings.function, hide=settings.hidden)
    shown = TemporaryDirectory(prefix="slipstream-images-")  # files that reward functions read
    try:
        health.waits_for(f"the broker at {run.broker_endpoint}")
        connecting = BrokerClient.connect(
            run.broker_endpoint,
            role="reward_worker",
            name=name,
            packages={f"reward {known.name}": known.version for known in pool.functions},
            outage_s=run.outage_s,
            key_file=run.key_file,
        )
        stopping: asyncio.Task[object] = asyncio.create_task(stop.wait())
        connected = await unless(connecting, stopping)
        stopping.cancel()
        if connected is None:
            return
        client, welcome = connected
        try:
            scorer = Scorer(
                client,
                pool,
                LocalImages(ImageFetcher(client).fetch, Path(shown.name)),
                max_credits=reward.credits,
                heartbeat_s=welcome.heartbeat_s,
            )
            functions = ", ".join(f"{known.name} ({known.version})" for known in pool.functions)
            _log.info("scoring for run %s with %s", welcome.run_name, functions)
            with health.main_loop(scorer.signs):
                await _work(client, pool, scorer, stop)
        finally:
            client.close()
    finally:
        await pool.close()
        shown.cleanup()


async def _work(
    client: BrokerClient, pool: RewardPool, scorer: Scorer, stop: asyncio.Event
) -> None:
    usage = ProcessUsage()

    async def report() -> None:
        counters = dict(scorer.counters)
        counters |= {f"replaced_{fault}": float(n) for fault, n in pool.replaced.items()}
        phases = scorer.clock.seconds()
        report = RoleReport(phase_seconds=phases, counters=counters, gauges=finite(usage.gauges()))
        await client.ask(report, Done)

    async def report_forever() -> None:
        while True:
            await report()
            await asyncio.sleep(REPORT_EVERY_S)

    try:
        async with running(stop.wait(), scorer.run(), report_forever()) as (stopping, job, reports):
            await asyncio.wait({stopping, job, reports}, return_when=asyncio.FIRST_COMPLETED)
            if stopping.done():
                scorer.stop()
                await asyncio.wait({job}, timeout=_DRAIN_S)
            for done in (job, reports):
                if done.done():
                    done.result()
            async with asyncio.timeout(_GOODBYE_S):
                await report()
                await client.ask(Goodbye(), Done)
    except TimeoutError:
        _log.info("the broker is gone already")


def _settings(arguments: argparse.Namespace) -> WorkerSettings:
    if arguments.broker:
        arguments.overrides.append(f"run.broker={arguments.broker}")
    if arguments.key:
        arguments.overrides.append(f"run.key_file={arguments.key}")
    table = load_arguments(arguments)
    settings = WorkerSettings(
        run_section(table),
        section(table, "reward", RewardSection),
        arguments.reward,
        private_paths(table),
    )
    if arguments.config is None and not settings.run.broker:
        raise ConfigError("which broker? give --config RUN.toml, or --broker tcp://HOST:PORT")
    return settings


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = role_parser(
        "start-reward-worker",
        "Score trajectories for the broker of a run, on its host or on any other.",
        [
            "start-reward-worker --config run.toml",
            "start-reward-worker --config run.toml --reward my_pkg.rewards:score --name worker-1",
            "start-reward-worker --broker tcp://10.0.0.1:5555 --key gpu7.key --reward my.py:score",
        ],
        needs_config=False,
    )
    parser.add_argument(
        "--reward",
        default="",
        metavar="MODULE:NAME",
        help="the function, or FILE.py:NAME; wins over reward.function",
    )
    parser.add_argument(
        "--broker", metavar="tcp://HOST:PORT", help="where the broker is, the same as run.broker"
    )
    parser.add_argument(
        "--key", metavar="FILE", help="key of this worker, the same as run.key_file"
    )
    parser.add_argument("--name", default="", help="unique within the run; default HOST-PID")
    add_health(parser)
    return parser


def main() -> int:
    """Parse, check, run."""
    return run_role(_main)


def _main() -> int:
    parser = make_parser()
    arguments = parser.parse_args()
    name = own_name(arguments.name)
    try:
        settings = _settings(arguments)
        logs = log_settings(load_arguments(arguments))
        endpoint = settings.run.broker_endpoint
    except ConfigError as error:
        return refuse_settings(error, arguments)
    if arguments.dry_run:
        function = settings.function or settings.reward.function
        print(f"would score with {function} for {endpoint}")  # noqa: T201
        return 0
    start_logging(name, logs)
    health = Health(name, stuck_s=settings.run.stuck_s)
    with serving(health, arguments.health):
        asyncio.run(serve(settings, name, health))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
