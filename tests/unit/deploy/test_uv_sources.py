from itertools import permutations
from pathlib import Path

from slipstream.deploy.setup.uv_sources import options


def test_uv_uses_the_index_and_links_of_pip(tmp_path: Path):
    listing = (
        "global.index-url='https://packages.example/simple'\n"
        f"global.find-links='{tmp_path} /nowhere'\n"
        "global.timeout='60'\n"
    )
    assert options(listing) == [
        *("--index-url", "https://packages.example/simple"),
        *("--find-links", str(tmp_path)),
    ]


def test_uv_searches_several_indexes_like_pip():
    listing = "install.extra-index-url='https://one.example/simple https://two.example/simple'\n"
    assert options(listing) == [
        *("--extra-index-url", "https://one.example/simple"),
        *("--extra-index-url", "https://two.example/simple"),
        *("--index-strategy", "unsafe-best-match"),
    ]


def test_the_environment_counts_more_than_files_in_whatever_order_pip_lists_them():
    lines = [
        ":env:.index-url='https://env.example'",
        "global.index-url='https://file.example'",
        "install.index-url='https://install.example'",
        "download.index-url='https://download.example'",
    ]
    for listing in permutations(lines):
        assert options("\n".join(listing)) == ["--index-url", "https://env.example"]
    assert options("\n".join(lines[1:])) == ["--index-url", "https://install.example"]


def test_without_an_index_none_is_asked(tmp_path: Path):
    listing = f"global.no-index='true'\nglobal.find-links='{tmp_path}'\n"
    assert options(listing) == ["--find-links", str(tmp_path), "--no-index"]


def test_no_configuration_is_no_option():
    assert options("") == []
