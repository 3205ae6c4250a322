#!/bin/bash
{{ variables }}
# Makes the folders and the password of Redis, once; its file is readable by its owner alone.
set -eu
umask 077
mkdir -p "$runs" "$out/redis" "$out/sockets"
[ -e "$out/redis_password" ] ||
    python3 -c 'import secrets; print(secrets.token_hex(24))' >"$out/redis_password"
