"""Files with which a cluster's own scheduler starts a run: pure functions, one module a target."""
