import asyncio

import pytest

from slipstream.broker.store.redis import RedisStore
from slipstream.wire.errors import ConfigError


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "redis://127.0.0.1:99999", "nonsense"])
def test_a_url_of_no_redis_names_its_setting(url: str):
    with pytest.raises(ConfigError, match=rf"'{url}' is no URL of a Redis \(broker\.redis\.url\)"):
        asyncio.run(RedisStore.connect(url, "run"))
