"""Pure: the time that is charged to a run, without its waits for a core."""


class ChargedTime:
    """Seconds in which a run had a core, or wanted none.

    While the run wants a core, only its CPU time counts; while it sleeps, or waits for something
    else, all of the time counts. So a busy machine makes no run too slow, and a run that hangs
    ends anyway.

    Waits for a disk are not charged up to a limit: a process whose child has not started its
    program yet (vfork) looks the same, for as long as it wants.
    """

    def __init__(self, now_s: float, cpu_s: float, *, disk_s: float) -> None:
        """Start.

        Args:
            now_s: Seconds of a monotonic clock.
            cpu_s: Processor seconds that the run has used so far.
            disk_s: Longest wait for a disk that is not charged.
        """
        self.began_s = now_s
        self.seconds = 0.0
        self._now_s, self._cpu_s, self._disk_s = now_s, cpu_s, disk_s
        self._wanted_core, self._waited_for_disk = True, False

    def tick(self, now_s: float, cpu_s: float, *, wants_core: bool, waits_for_disk: bool) -> None:
        """Add the time since the last call.

        Args:
            now_s: Seconds of the same clock.
            cpu_s: Processor seconds that the run has used so far.
            wants_core: True if a thread of it runs, or waits for a core.
            waits_for_disk: True if a thread of it seems to wait for a disk.
        """
        elapsed = max(0.0, now_s - self._now_s)
        used = min(elapsed, max(0.0, cpu_s - self._cpu_s))
        if wants_core or self._wanted_core:
            self.seconds += used
        elif waits_for_disk or self._waited_for_disk:
            spared = min(elapsed - used, self._disk_s)
            self._disk_s -= spared
            self.seconds += elapsed - spared
        else:
            self.seconds += elapsed
        self._now_s, self._cpu_s = now_s, max(cpu_s, self._cpu_s)
        self._wanted_core, self._waited_for_disk = wants_core, waits_for_disk
