"""Whether the head of a Ray cluster accepts requests without a token.

The head decides for all nodes: a node whose Ray needs no token sends none, and cannot join a head
that needs one.
"""

import os
import subprocess
import sys

from slipstream.wire.errors import ConfigError

_MODE = "RAY_AUTH_MODE"  # Ray's variable; "token" turns authentication on
_COMMAND = (sys.executable, "-m", "ray.scripts.scripts", "status", "--address")  # `ray status`


def require_token(address: str, limit_s: float) -> None:
    """Ask the head of a cluster for its status without a token.

    Raises:
        ConfigError: the head answers, or does not ask for a token.
    """
    ours = os.environ.items()  # noqa: TID251 handed on, but for Ray's token
    environment = {name: value for name, value in ours if not name.startswith("RAY_AUTH_")}
    try:
        done = subprocess.run(  # noqa: S603 Ray's own program
            [*_COMMAND, address],
            env=environment | {_MODE: "disabled"},
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=limit_s,
        )
        code, words = done.returncode, done.stderr
    except subprocess.TimeoutExpired:
        code, words = None, f"silence for {limit_s:g} s (deploy.ray.start_timeout_s)"
    if refusal := refusal_of(address, code, words):
        raise ConfigError(refusal)


def refusal_of(address: str, code: int | None, words: str) -> str:
    """Return why a cluster is refused; empty if it is accepted.

    `ray status` without a token ended with ``code``, or not (None), and wrote ``words``.
    """
    if code != 0 and "AuthenticationError" in words:
        return ""
    lines = words.strip().splitlines() or [f"exit code {code}"]
    found = (
        "answers without a token: whoever reaches its ports runs code"
        if code == 0
        else f"does not say that it wants a token ({lines[-1]:.200})"
    )
    return (
        f"{address}, the head of the Ray cluster, {found}. Start Ray with {_MODE}=token, or set "
        "deploy.ray.require_token = false where its network is closed"
    )
