"""Commands run as a user who is not root, on a machine where tests are."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

NOBODY = 65534


def as_nobody(command: Sequence[str]) -> list[str]:
    """Return the argv of a command as a normal user, who may pass to our interpreter.

    In a copy of the mounts, where a folder such as /root that leads to it holds it alone.
    """
    if os.geteuid():
        return list(command)
    steps = ["set -e"]
    for folder in {Path(path).resolve() for path in (sys.base_prefix, sys.prefix)}:
        private = [one for one in folder.parents if not one.stat().st_mode & 0o001]
        if private:
            steps += [
                f"mount --bind {folder} /mnt",
                f"mount -t tmpfs -o mode=0755 none {private[-1]}",
                f"mkdir -p {folder}",
                f"mount --move /mnt {folder}",
            ]
    user = f"setpriv --reuid={NOBODY} --regid={NOBODY} --clear-groups"
    steps.append(f'exec {user} -- "$0" "$@"')
    return ["unshare", "--mount", "sh", "-c", "\n".join(steps), *command]
