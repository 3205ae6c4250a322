from pathlib import Path

from deploy.uv_sources import options


def test_uv_looks_where_pip_is_told_to_look(tmp_path: Path):
    listing = (
        "global.index-url='https://packages.example/simple'\n"
        f"global.find-links='{tmp_path} /nowhere'\n"
        "global.timeout='60'\n"
    )
    assert options(listing) == [
        *("--index-url", "https://packages.example/simple"),
        *("--find-links", str(tmp_path)),
    ]


def test_several_indexes_are_all_looked_at_as_pip_does():
    listing = "install.extra-index-url='https://one.example/simple https://two.example/simple'\n"
    assert options(listing) == [
        *("--extra-index-url", "https://one.example/simple"),
        *("--extra-index-url", "https://two.example/simple"),
        *("--index-strategy", "unsafe-best-match"),
    ]


def test_the_environment_takes_the_place_of_a_file_as_pip_lists_them():
    listing = "global.index-url='https://file.example'\n:env:.index-url='https://env.example'\n"
    assert options(listing) == ["--index-url", "https://env.example"]


def test_no_configuration_is_no_option():
    assert options("") == []
