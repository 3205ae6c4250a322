#!/bin/bash
{{ variables }}
# Makes the keys of the run's roles, once, in a folder that its owner alone can read.
set -eu
umask 077
for role in learner learner_part generator reward_worker; do
    [ -e "$keys/clients/sky-$role.key" ] ||
        slipstream keys make "sky-$role" --role "$role" --keys "$keys" >/dev/null
done
