install -m 0600 /run/secret/broker.key /run/keys/
install -d -m 0700 /run/keys/authorized
install -m 0600 /run/secret/*.toml /run/keys/authorized/
install -d -m 0700 /run-volume/{{ run_name }}/dashboard
install -m 0600 /run/secret/token /run-volume/{{ run_name }}/dashboard/token
