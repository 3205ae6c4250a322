import pytest

from slipstream.wire.errors import ConfigError
from slipstream.wire.process.environment import handed_on, sparing_this_host

OURS = {
    "PATH": "/bin",
    "LC_ALL": "C",
    "OMP_NUM_THREADS": "1",
    "NCCL_DEBUG": "INFO",
    "NCCL_TOKEN": "t",
    "WANDB_API_KEY": "w",
    "HF_TOKEN": "h",
    "HF_HOME": "/cache",
    "AWS_SECRET_ACCESS_KEY": "a",
    "AWS_PROFILE": "p",
    "PYTHON_KEYRING_PASSWORD": "k",
    "OPENAI_API_KEY": "o",
}


def test_a_child_gets_what_programs_need_and_no_secret():
    assert handed_on(OURS).keys() == {"PATH", "LC_ALL", "OMP_NUM_THREADS", "HF_HOME"}


def test_what_a_setting_names_is_handed_on_whatever_it_is_called():
    found = handed_on(OURS, named=["OPENAI_API_KEY"], setting="reward.environment")
    assert found["OPENAI_API_KEY"] == "o"
    assert "WANDB_API_KEY" not in found


def test_further_prefixes_bring_no_secret_with_them():
    found = handed_on(OURS, prefixes=("NCCL_",))
    assert found["NCCL_DEBUG"] == "INFO"
    assert "NCCL_TOKEN" not in found


def test_requested_variable_that_is_missing_is_named():
    with pytest.raises(ConfigError, match=r"reward\.environment names NONE, which is not in the"):
        handed_on(OURS, named=["NONE"], setting="reward.environment")


@pytest.mark.parametrize(
    ("given", "spared"),
    [
        ({}, "localhost,127.0.0.1,::1"),
        ({"http_proxy": "http://p", "no_proxy": ""}, "localhost,127.0.0.1,::1"),
        (
            {"NO_PROXY": "corp.example, 127.0.0.1"},
            "corp.example, 127.0.0.1,localhost,127.0.0.1,::1",
        ),
        ({"no_proxy": "a", "NO_PROXY": "b"}, "a,b,localhost,127.0.0.1,::1"),
        ({"NO_PROXY": "*"}, "*"),
    ],
)
def test_no_proxy_stands_before_this_host(given: dict[str, str], spared: str):
    assert sparing_this_host(given) == {**given, "no_proxy": spared, "NO_PROXY": spared}
