from slipstream.broker.store.redis import Persistence
from slipstream.deploy.preflight.check.store import judge_persistence


def test_a_server_must_keep_what_it_acknowledged():
    for seen, outcome, words in [
        (Persistence(True, "always", "noeviction"), "ok", "appendfsync always"),
        (Persistence(True, "everysec", "noeviction"), "warn", "a crash can lose"),
        (Persistence(False, "everysec", "noeviction"), "fail", "appendonly is no, expected yes"),
        (Persistence(True, "always", "allkeys-lru"), "fail", "allkeys-lru, expected noeviction"),
        (None, "warn", "CONFIG is not permitted"),
    ]:
        fact = judge_persistence(seen)
        assert fact.outcome == outcome
        assert words in fact.found
