# Every node runs this: the first has the broker and the reward workers, the learner begins there too.
set -u
export OMP_NUM_THREADS=1
umask 077
rank=$SKYPILOT_NODE_RANK
head=$(head -n 1 <<<"$SKYPILOT_NODE_IPS")
sockets="${TMPDIR:-/tmp}/slipstream-$(id -u)"
chmod -R go-rwx "$keys"
settings=("run.dir=$run_dir" "run.socket_dir=$sockets" "broker.keys=$keys")
at=("run.broker=tcp://$head:$port")
[ "$collectives" = 0 ] || at+=("weightbus.host=$head")
key() { echo "run.key_file=$keys/clients/sky-$1.key"; }

own=() learner='' broker='' stopping=0
trap 'stopping=1; [ -z "$learner" ] || kill -TERM "$learner"; [ "$rank" = 0 ] || kill -TERM "${own[@]}"' TERM
start() { # GPUS COMMAND...: in the background
    local gpus=$1
    shift
    [ -z "$gpus" ] || export CUDA_VISIBLE_DEVICES="$gpus"
    exec "$@"
}
if [ "$rank" = 0 ]; then
    start '' start-broker --config "$config" "${settings[@]}" "broker.listen=tcp://$head:$port" &
    broker=$!
    for ((i = 0; i < reward_workers; i++)); do
        start '' start-reward-worker --config "$config" --name "reward-worker-$i" \
            "${settings[@]}" "${at[@]}" "$(key reward_worker)" &
        own+=($!)
    done
fi
if [ "$rank" -lt "$learner_nodes" ]; then
    nodes=() part=learner
    [ "$learner_nodes" = 1 ] || nodes=(--node "$rank" --rendezvous "$head:$((port + 3))")
    [ "$rank" = 0 ] || part=learner_part
    start "$learner_gpus" start-learner --config "$config" --resume auto "${nodes[@]}" \
        "${settings[@]}" "${at[@]}" "$(key "$part")" "weightbus.listen=tcp://$head:$((port + 1))" &
    learner=$!
fi
for i in "${!generators[@]}"; do
    IFS=: read -r node gpus <<<"${generators[$i]}"
    [ "$node" = "$rank" ] || continue
    start "$gpus" start-generator --config "$config" --name "generator-$i" \
        "${settings[@]}" "${at[@]}" "$(key generator)" &
    own+=($!)
done

until_ended() { # PID: a signal ends `wait` early
    while kill -0 "$1" 2>/dev/null; do wait "$1"; done
    wait "$1"
}
code=0
if [ -n "$learner" ]; then
    until_ended "$learner"
    code=$?
    # Where it was asked to end the run is not complete: the others would wait for more of it.
    [ "$code$stopping" = 00 ] || kill -TERM "${own[@]}" 2>/dev/null
fi
for pid in "${own[@]}"; do # they end with the run
    until_ended "$pid" || [ -n "$learner" ] || code=1
done
if [ -n "$broker" ]; then
    kill -TERM "$broker"
    until_ended "$broker"
fi
exit "$code"
