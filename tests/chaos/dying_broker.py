"""The real broker, killed right after Redis has taken a commit before any client is answered."""

import os
import signal
import sys
from pathlib import Path

from slipstream.broker import main as broker_main
from slipstream.broker.store.base import Changes
from slipstream.broker.store.redis import RedisStore

_EVERY = 60  # commits of payloads between two deaths
_DEATHS = 4


def main() -> int:
    config = Path(sys.argv[sys.argv.index("--config") + 1])
    deaths = config.parent / "broker-deaths"
    commit = RedisStore.commit
    seen = 0

    async def commit_and_die(self: RedisStore, changes: Changes) -> None:
        nonlocal seen
        await commit(self, changes)
        seen += bool(changes.put)
        died = len(deaths.read_text()) if deaths.exists() else 0
        if seen == _EVERY and died < _DEATHS:
            deaths.write_text("x" * (died + 1))
            os.kill(os.getpid(), signal.SIGKILL)

    RedisStore.commit = commit_and_die  # type: ignore[method-assign]
    return broker_main.main()


if __name__ == "__main__":
    raise SystemExit(main())
