"""An S3 server of this process, as remote storage for tests."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.request import Request, urlopen

import fsspec
import pytest

BUCKET = "s3://bucket"


@contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """Serve an empty bucket; yield the variables with which drivers reach it, which are set."""
    moto = pytest.importorskip("moto.moto_server.threaded_moto_server")
    server = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    address = f"http://{host}:{port}"
    variables = {
        "AWS_ACCESS_KEY_ID": "tester",
        "AWS_SECRET_ACCESS_KEY": "not-a-secret",
        "AWS_ENDPOINT_URL": address,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }
    try:
        for path, method in (("moto-api/reset", "POST"), ("bucket", "PUT")):
            with urlopen(Request(f"{address}/{path}", method=method)):  # noqa: S310
                pass
        with variables_set(variables):
            yield variables
    finally:
        server.stop()


@contextmanager
def variables_set(variables: dict[str, str]) -> Iterator[None]:
    """Set variables, empty ones aside; drivers read the environment again at both ends."""
    driver = fsspec.get_filesystem_class("s3")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            if value:
                patch.setenv(name, value)
            else:
                patch.delenv(name)
        driver.clear_instance_cache()
        yield
    driver.clear_instance_cache()
