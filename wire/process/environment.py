"""Which variables of our environment a child gets: those that are named, and no secret by chance.

A shell that starts runs often holds keys (WANDB_API_KEY, HF_TOKEN, AWS_SECRET_ACCESS_KEY). Code of
others, or of a library that is large, gets what programs need to find files and to use the machine.
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
_SECRETS = ("KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIALS")


def handed_on(
    environment: Mapping[str, str],
    *,
    named: Collection[str] = (),
    prefixes: tuple[str, ...] = (),
    setting: str = "",
) -> dict[str, str]:
    """Return what of an environment a child gets.

    Args:
        environment: ours.
        named: variables that it gets besides, as the user asked; secrets among them.
        prefixes: of further variables that it gets, unless their last word says that they are
            secret.
        setting: where ``named`` comes from.

    Raises:
        ConfigError: a variable that was asked for is not there.
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


def _is_harmless(name: str, prefixes: tuple[str, ...]) -> bool:
    return name.startswith(prefixes) and name.upper().rpartition("_")[2] not in _SECRETS
