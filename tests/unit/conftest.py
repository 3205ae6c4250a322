import gc


def pytest_collection_finish() -> None:
    """Leave what was imported out of every later search for garbage: it lives to the end."""
    gc.collect()
    gc.freeze()
