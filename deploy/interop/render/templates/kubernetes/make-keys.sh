#!/bin/bash
namespace={{ namespace }}
run={{ run }}
# Makes the keys of a run, once, and loads them into the cluster. Needs slipstream and kubectl here.
# No secret is in an argument or a file that others can read.
set -euo pipefail
umask 077
keys=$(mktemp -d)
trap 'rm -rf "$keys"' EXIT

if kubectl --namespace "$namespace" get secret "$run-broker-keys" >/dev/null 2>&1; then
    echo "the run $run has keys already; to make others, first: " \
        "kubectl --namespace $namespace delete secret $run-{broker,learner,generator,reward-worker}-keys" >&2
    exit 1
fi
slipstream keys make learner --role learner --keys "$keys" >/dev/null
slipstream keys make learner-part --role learner_part --keys "$keys" >/dev/null
slipstream keys make generator --role generator --keys "$keys" >/dev/null
slipstream keys make reward-worker --role reward_worker --keys "$keys" >/dev/null
python -c 'import secrets; print(secrets.token_hex(24), end="")' >"$keys/token"

for role in learner generator reward-worker; do
    files=("--from-file=role.key=$keys/clients/$role.key")
    [ "$role" != learner ] || files+=("--from-file=part.key=$keys/clients/learner-part.key")
    kubectl --namespace "$namespace" create secret generic "$run-$role-keys" "${files[@]}"
done
kubectl --namespace "$namespace" create secret generic "$run-broker-keys" \
    "--from-file=broker.key=$keys/broker.key" "--from-file=token=$keys/token" \
    "--from-file=learner.toml=$keys/authorized/learner.toml" \
    "--from-file=learner-part.toml=$keys/authorized/learner-part.toml" \
    "--from-file=generator.toml=$keys/authorized/generator.toml" \
    "--from-file=reward-worker.toml=$keys/authorized/reward-worker.toml"
