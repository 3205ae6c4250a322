"""An S3 server of this process, as remote storage for tests."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.request import Request, urlopen

import pytest

BUCKET = "s3://bucket"


@contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """Serve an empty bucket; yield the variables with which a driver reaches it."""
    moto = pytest.importorskip("moto.moto_server.threaded_moto_server")
    server = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    address = f"http://{host}:{port}"
    try:
        for path, method in (("moto-api/reset", "POST"), ("bucket", "PUT")):
            with urlopen(Request(f"{address}/{path}", method=method)):  # noqa: S310
                pass
        yield {
            "AWS_ACCESS_KEY_ID": "tester",
            "AWS_SECRET_ACCESS_KEY": "not-a-secret",
            "AWS_ENDPOINT_URL": address,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }
    finally:
        server.stop()
