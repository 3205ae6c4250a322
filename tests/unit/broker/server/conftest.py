"""A broker that runs in a private folder."""

from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from tests.support.running_broker import Running, running


@pytest.fixture
def it(short_folder: Path) -> AbstractAsyncContextManager[Running]:
    return running(short_folder)
