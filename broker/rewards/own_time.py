"""The time that a run took for itself on a machine that others use, too. Pure."""


class OwnTime:
    """Seconds in which a run had a core, or wanted none.

    Looked at now and then: where the run wants a core, only what it got of the processor counts;
    where it sleeps, or waits for what does not come, all of the time does. So a busy machine makes
    no run too slow, and a run that hangs ends all the same.
    """

    def __init__(self, now_s: float, cpu_s: float) -> None:
        """Begin.

        Args:
            now_s: seconds of a monotonic clock.
            cpu_s: processor seconds that the run has used so far.
        """
        self.began_s = now_s
        self.seconds = 0.0
        self._now_s, self._cpu_s = now_s, cpu_s
        self._wanted_core = True

    def tick(self, now_s: float, cpu_s: float, *, wants_core: bool) -> None:
        """Add what has passed since the last look.

        Args:
            now_s: seconds of the same clock.
            cpu_s: processor seconds that the run has used so far.
            wants_core: whether something of it would go on if the machine let it.
        """
        elapsed = max(0.0, now_s - self._now_s)
        used = min(elapsed, max(0.0, cpu_s - self._cpu_s))
        self.seconds += used if wants_core or self._wanted_core else elapsed
        self._now_s, self._cpu_s = now_s, max(cpu_s, self._cpu_s)
        self._wanted_core = wants_core
