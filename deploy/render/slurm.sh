# The broker, the learner and the reward workers are on the first node, generators on the others.
# A failed generator, reward worker or broker is started again; the end of the learner is the end
# of the job. SIGTERM (preemption, or the time limit is near) lets the learner save, and requeues
# the job, which resumes from the newest checkpoint and the ledger.

set -u
umask 077
fail() { echo "run.sbatch: $*" >&2; exit 1; }

cd -- "$work_folder" || fail "cannot enter $work_folder: the nodes need the file system it is on"
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
needed=$((1 + (generators + generators_per_node - 1) / generators_per_node))
[ "${#nodes[@]}" -ge "$needed" ] || fail "expected $needed nodes (--nodes), got ${#nodes[@]}"
address=$(getent ahostsv4 "${nodes[0]}" | awk 'NR == 1 { print $1 }')
case $address in
  '' | 127.0.0.1 | 127.0.1.1)
    fail "the name ${nodes[0]} means '$address' on that node, where other nodes cannot connect" ;;
esac
logs=$run_folder/logs
mkdir -p -- "$logs" || fail "cannot make $logs"
sockets=/tmp/slipstream-$(id -u)-$SLURM_JOB_ID # short, and on the node itself
export OMP_NUM_THREADS=1
near=("${overrides[@]}" "run.socket_dir=$sockets"
  "broker.listen=tcp://$address:$broker_port" "weightbus.listen=tcp://$address:$weights_port")

for ((i = 1; i < needed; i++)); do
  [ -f "$keys/clients/node-$i.key" ] && continue
  "$python" -m slipstream.deploy.main keys make "node-$i" --role generator --keys "$keys" \
    >>"$logs/keys.log" 2>&1 || fail "no key for node-$i, see $logs/keys.log"
done

on() { # NODE NAME GPUS COMMAND...: become one process on a node
  local node=$1 name=$2 gpus=$3
  shift 3
  [ -z "$gpus" ] || export CUDA_VISIBLE_DEVICES=$gpus
  exec srun --overlap --nodes=1 --ntasks=1 --mem=0 --cpu-bind=none --nodelist="$node" \
    --job-name="$name" "$@" >>"$logs/$name.log" 2>&1
}
broker() {
  local again=()
  [ ! -e "$run_folder/identity.json" ] || again=(--restarted)
  on "${nodes[0]}" broker '' \
    "$python" -m slipstream.broker.main --config "$config" "${again[@]}" "${near[@]}"
}
learner() {
  on "${nodes[0]}" learner "$learner_gpus" \
    "$python" -m slipstream.learner.main --config "$config" --resume auto "${near[@]}"
}
reward_worker() { # NUMBER
  on "${nodes[0]}" "reward-worker-$1" '' \
    "$python" -m slipstream.broker.reward_worker.main --config "$config" \
    --name "reward-worker-$1" "${near[@]}"
}
generator() { # NUMBER
  local node=$((1 + $1 / generators_per_node)) first=$(($1 % generators_per_node)) gpus=''
  [ "$gpus_per_generator" = 0 ] || gpus=$(seq -s , $((first * gpus_per_generator)) \
    $(((first + 1) * gpus_per_generator - 1)))
  on "${nodes[$node]}" "generator-$1" "$gpus" \
    "$python" -m slipstream.generators.main --config "$config" --name "generator-$1" \
    "${overrides[@]}" "run.socket_dir=$sockets-$1" "run.broker=tcp://$address:$broker_port" \
    "run.key_file=$keys/clients/node-$node.key"
}
ended() { # PID: wait for its end, through signals; its exit code
  local code
  wait "$1"
  code=$?
  while kill -0 "$1" 2>/dev/null; do
    wait "$1"
    code=$?
  done
  return "$code"
}
keep() { # COMMAND...: start it again each time it fails, max_restarts times
  local is_over=0 child='' failures=0 code
  trap 'is_over=1; [ -z "$child" ] || kill -TERM "$child" 2>/dev/null' TERM
  while [ "$is_over" = 0 ]; do
    ("$@") &
    child=$!
    ended "$child"
    code=$?
    [ "$is_over" = 0 ] && [ "$code" != 0 ] || return 0
    failures=$((failures + 1))
    echo "run.sbatch: $* ended with exit code $code, failure $failures" >&2
    [ "$failures" -le "$max_restarts" ] || return "$code"
    sleep "$failures"
  done
}
gone_by() { # SECONDS PID...: wait so long at most; Slurm kills what is left as the script ends
  local deadline=$((SECONDS + $1)) process
  shift
  for process; do
    while kill -0 "$process" 2>/dev/null && [ "$SECONDS" -lt "$deadline" ]; do sleep 0.2; done
  done
}

others=()
is_stopping=0
learner_process=''
trap 'is_stopping=1; [ -z "$learner_process" ] || kill -TERM "$learner_process"' TERM
keep broker &
broker_process=$!
for ((i = 0; i < generators; i++)); do keep generator "$i" & others+=($!); done
for ((i = 0; i < reward_workers; i++)); do keep reward_worker "$i" & others+=($!); done
(learner) &
learner_process=$!
[ "$is_stopping" = 0 ] || kill -TERM "$learner_process"
ended "$learner_process"
code=$?
# After the last step the others end by themselves.
[ "$is_stopping" = 1 ] || [ "$code" != 0 ] || gone_by "$stop_limit_s" "${others[@]}"
for process in "${others[@]}"; do kill -TERM "$process" 2>/dev/null; done
gone_by "$stop_limit_s" "${others[@]}"
kill -TERM "$broker_process" 2>/dev/null
gone_by "$stop_limit_s" "$broker_process"
if [ "$is_stopping" = 1 ] && ! grep -Eq '"outcome": *"finished"' "$run_folder/summary.json"; then
  echo "run.sbatch: stopped before the end of the run, requeued" >&2
  scontrol requeue "$SLURM_JOB_ID" || fail "Slurm did not requeue the job $SLURM_JOB_ID"
  exit 0
fi
exit "$code"
