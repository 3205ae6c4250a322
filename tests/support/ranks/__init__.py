"""Programs that tests start as ranks of a process group."""
