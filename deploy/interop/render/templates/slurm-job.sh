#!/bin/bash
# Written by `slipstream render slurm`. Start: sbatch job.sbatch; end: scancel --batch
# --signal=TERM JOB saves and queues it again, scancel JOB ends it.
{{ options }}

{{ variables }}

setup() {
{{ setup }}
}

# ---- from here on the script is the same for every run ------------------------
# The first node has the broker. The learner, its end and its exit code are those of the job; a
# generator or reward worker that fails is started again, and the run goes on without one that keeps
# failing. SIGTERM (before the end of the time, or as the job is preempted) lets the learner save and
# the others hand back their work; then the job is queued again, and resumes.

cd "$work" || exit 1
setup
set -u # not before: `conda activate` and modules read variables that are not set
export OMP_NUM_THREADS=1
umask 077

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=$(getent ahostsv4 "${nodes[0]}" | awk 'NR == 1 { print $1 }')
case $head in
'' | 127.0.0.1 | 127.0.1.1)
    if [ "${#nodes[@]}" -gt 1 ]; then
        echo "${nodes[0]} means '$head' on that node: other nodes cannot connect there" >&2
        exit 1
    fi
    head=127.0.0.1 ;;
esac
[ "$port" -gt 0 ] || port=$((20000 + SLURM_JOB_ID % 2500 * 5))
sockets="${TMPDIR:-/tmp}/slipstream-$SLURM_JOB_ID"
mkdir -p "$run_folder/logs"

make_key() { # ROLE: once, in the run folder, readable by its owner alone
    [ -e "$keys/clients/slurm-$1.key" ] || slipstream keys make "slurm-$1" --role "$1" --keys "$keys"
}
for role in learner learner_part generator reward_worker; do
    make_key "$role" || exit 1
done

settings=("run.socket_dir=$sockets" "broker.keys=$keys")
remote() { # ROLE: settings by which it reaches the broker
    printf '%s\n' "run.broker=tcp://$head:$port" "run.key_file=$keys/clients/slurm-$1.key"
}
mapfile -t to_learn < <(remote learner)
mapfile -t to_generate < <(remote generator)
mapfile -t to_score < <(remote reward_worker)
to_learn+=("weightbus.listen=tcp://$head:$((port + 1))")
if [ "$collectives" = 1 ]; then
    to_learn+=("weightbus.host=$head")
    to_generate+=("weightbus.host=$head")
fi

step() { # NODE COUNT GPUS COMMAND...: on COUNT nodes from NODE on, seeing those GPUs of them
    local node=$1 count=$2 gpus=$3
    shift 3
    local call=(srun --overlap "--relative=$node" "--nodes=$count" "--ntasks=$count")
    call+=(--ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=1)
    if [ -n "$gpus" ]; then
        call+=("--gpus-per-node=$gpus_per_node" env "CUDA_VISIBLE_DEVICES=$gpus")
    fi
    exec "${call[@]}" "$@"
}

keep() { # NAME ON_RESTART COMMAND...: run it, and again if it fails, then with ON_RESTART too
    local name=$1 on_restart=$2 left=$max_restarts pause=1 ending=0 child='' code started
    shift 2
    local again=()
    trap 'ending=1; kill -TERM "$child" 2>/dev/null' TERM
    while :; do
        started=$SECONDS
        "$@" "${again[@]}" >>"$run_folder/logs/$name.log" 2>&1 &
        child=$!
        [ "$ending" = 0 ] || kill -TERM "$child" 2>/dev/null
        while :; do # a signal ends `wait` early
            wait "$child"
            code=$?
            kill -0 "$child" 2>/dev/null || break
        done
        if [ "$name$code$ending" = broker00 ]; then # Slurm ended all steps at once: the others drain
            again=("$on_restart")
            continue
        fi
        case $code in 0 | 2 | 3) return "$code" ;; esac # done, refused, or another has its place
        [ "$ending" = 0 ] || return "$code"
        [ $((SECONDS - started)) -le "$restart_window_s" ] || left=$max_restarts pause=1
        if [ "$left" -le 0 ]; then
            echo "$name ended with code $code, too often (deploy.max_restarts): it is given up" >&2
            return "$code"
        fi
        echo "$name ended with code $code and is started again in $pause s" >&2
        left=$((left - 1))
        sleep "$pause" &
        wait $! # a signal ends this at once
        [ "$ending" = 0 ] || return "$code"
        pause=$((pause * 2))
        [ -z "$on_restart" ] || again=("$on_restart")
    done
}

finish() { # PID...: end keepers and wait for them
    local pid
    [ $# -gt 0 ] || return 0
    kill -TERM "$@" 2>/dev/null
    for pid in "$@"; do
        while kill -0 "$pid" 2>/dev/null; do wait "$pid"; done
    done
}

stopping=0 lost=0
trap 'stopping=1' TERM

keep broker --restarted step 0 1 '' start-broker --config "$config" "${settings[@]}" \
    "broker.listen=tcp://$head:$port" &
broker=$!

begin=(start-learner --config "$config" --resume auto)
[ "$learner_nodes" -eq 1 ] || begin+=(--rendezvous "$head:$((port + 3))")
begin+=("${settings[@]}" "${to_learn[@]}")
if [ "$learner_nodes" -gt 1 ]; then # each node finds its number; the first serves health
    begin=(bash -c 'if [ "$SLURM_NODEID" = 0 ]; then set -- "${@:2}" --health "$0"
        else set -- "${@:2}" "run.key_file=$1"; fi; exec "$@" --node "$SLURM_NODEID"'
        "$((port + 4))" "$keys/clients/slurm-learner_part.key" "${begin[@]}")
else
    begin+=(--health "$((port + 4))")
fi
keep learner '' step 0 "$learner_nodes" "$learner_gpus" "${begin[@]}" &
learner=$!

generating=() scoring=()
for i in "${!generators[@]}"; do
    IFS=: read -r node gpus <<<"${generators[$i]}"
    keep "generator-$i" '' step "$node" 1 "$gpus" start-generator --config "$config" \
        --name "generator-$i" "${settings[@]}" "${to_generate[@]}" &
    generating+=($!)
done
for ((i = 0; i < reward_workers; i++)); do
    keep "reward-worker-$i" '' step 0 1 '' start-reward-worker --config "$config" \
        --name "reward-worker-$i" "${settings[@]}" "${to_score[@]}" &
    scoring+=($!)
done

are_lost() { # PID...: all of these keepers have failed
    local pid
    [ $# -gt 0 ] || return 1
    for pid in "$@"; do
        kill -0 "$pid" 2>/dev/null && return 1
        wait "$pid" && return 1
    done
    return 0
}

tell_learner() { # to save and end, unless Slurm has: a second signal ends it at once
    local health
    sleep 1
    health=$(python -m slipstream.wire.process.health --port "$((port + 4))" ready 2>&1)
    case $health in *'asked to end'*) ;; *) kill -TERM "$learner" 2>/dev/null ;; esac
}

told=0
while kill -0 "$learner" 2>/dev/null; do
    if [ "$stopping" = 1 ] && [ "$told" = 0 ]; then
        tell_learner
        told=1
    fi
    if are_lost "$broker" || are_lost "${generating[@]}" || are_lost "${scoring[@]}"; then
        echo "all processes of a role are given up: the learner saves, and the job ends" >&2
        finish "$learner"
        lost=1
        break
    fi
    sleep 1 &
    wait $! # a signal ends this at once
done
wait "$learner"
code=$?
finish "${generating[@]}" "${scoring[@]}"
finish "$broker"
# A step over a node that is lost may never end, and the job has to be queued again.
timeout 60 srun --overlap "--nodes=${#nodes[@]}" --ntasks-per-node=1 rm -rf "$sockets"

if grep -qs '"finished": *true' "$run_folder/ledger/account.json"; then
    echo "the run is complete: $run_folder"
    exit 0
fi
if [ "$stopping" = 1 ]; then
    echo "stopped at the request of Slurm; queued again to resume"
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
fi
echo "the learner ended with code $code: see $run_folder/logs" >&2
[ "$code" -ne 0 ] && [ "$lost" = 0 ] || code=1
exit "$code"
