asked=0 learner=''
trap 'asked=143; [ -z "$learner" ] || kill -TERM "$learner"' TERM
"$@" &
learner=$!
[ "$asked" = 0 ] || kill -TERM "$learner"
while :; do # a signal ends `wait` early
    wait "$learner"
    code=$?
    kill -0 "$learner" 2>/dev/null || break
done
[ "$code" != 0 ] || code=$asked
exit "$code"
