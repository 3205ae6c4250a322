"""The environment of a child: named variables, without secrets by accident.

A shell that starts runs often holds keys (WANDB_API_KEY, HF_TOKEN, AWS_SECRET_ACCESS_KEY). Foreign
code and large libraries get only the variables needed to find files and use the machine.
"""

from collections.abc import Collection, Mapping

from slipstream.wire.errors import ConfigError

_NAMES = {
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TERM", "COLUMNS"),
    *("TMPDIR", "TEMP", "TMP", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "LD_PRELOAD"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
    *("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_RUNTIME_DIR"),
    *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_ENDPOINT", "HUGGINGFACE_HUB_CACHE"),
    *("HF_DATASETS_CACHE", "HF_DATASETS_OFFLINE", "TORCH_HOME"),
    *("TRANSFORMERS_CACHE", "TRANSFORMERS_OFFLINE"),
}
_PREFIXES = (
    *("LC_", "PYTHON", "MALLOC_", "TOKENIZERS_", "CUDA_", "NVIDIA_"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "NUMEXPR_"),
)
_NO_PROXY = ("no_proxy", "NO_PROXY")  # order in which programs that use only one read them
_THIS_HOST = ("localhost", "127.0.0.1", "::1")
_SECRETS = ("KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIALS")


def handed_on(
    environment: Mapping[str, str],
    *,
    named: Collection[str] = (),
    prefixes: tuple[str, ...] = (),
    setting: str = "",
) -> dict[str, str]:
    """Return the part of an environment that a child gets.

    Args:
        environment: Variables of this process.
        named: additional variables chosen by the user; may be secrets.
        prefixes: Prefixes of additional variables, without those whose last word is a secret's.
        setting: Name of the setting with ``named``.

    Raises:
        ConfigError: a named variable is not set.
    """
    for name in named:
        if name not in environment:
            raise ConfigError(
                f"{setting} names {name}, which is not in the environment of this process"
            )
    return {
        name: value
        for name, value in environment.items()
        if name in named or name in _NAMES or _is_harmless(name, (*_PREFIXES, *prefixes))
    }


def sparing_this_host(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which addresses of this host bypass proxies."""
    given = [environment[name] for name in _NO_PROXY if environment.get(name)]
    spared = "*" if "*" in given else ",".join((*given, *_THIS_HOST))
    return {**environment, **dict.fromkeys(_NO_PROXY, spared)}


def _is_harmless(name: str, prefixes: tuple[str, ...]) -> bool:
    return name.startswith(prefixes) and name.upper().rpartition("_")[2] not in _SECRETS
