key=role.key
[ "$NODE" = 0 ] || key=part.key
install -m 0600 "/run/secret/$key" /run/keys/role.key
timeout 60 sh -c 'until getent hosts {{ leader }}; do sleep 1; done' || true
