"""What counts as a run's own time."""

from slipstream.broker.sandbox.charged_time import ChargedTime


def own_s(*samples: tuple[float, float, bool], disk: bool = False) -> float:
    """Return the own time after samples of (clock, processor seconds, whether it wants a core).

    With ``disk``, two seconds of waiting for one are free.
    """
    clock = ChargedTime(100.0, 5.0, disk_s=2.0)
    for now_s, cpu_s, wants_core in samples:
        clock.tick(100.0 + now_s, 5.0 + cpu_s, wants_core=wants_core, waits_for_disk=disk)
    return round(clock.seconds, 9)


def test_computing_process_is_charged_its_cpu_time():
    assert own_s((1.0, 1.0, True), (2.0, 2.0, True)) == 2.0
    assert own_s((1.0, 0.2, True), (2.0, 0.4, True)) == 0.4
    assert own_s((10.0, 0.0, True)) == 0.0


def test_sleeping_process_is_charged_the_whole_time():
    assert own_s((1.0, 0.0, False), (2.0, 0.0, False)) == 1.0  # what was before is not known
    assert own_s((0.0, 0.0, False), (5.0, 0.0, False)) == 5.0


def test_process_that_woke_up_is_charged_its_cpu_time():
    assert own_s((0.0, 0.0, False), (1.0, 0.3, True), (2.0, 0.5, False), (3.0, 0.5, False)) == 1.5


def test_several_threads_are_charged_with_the_clock_at_most():
    assert own_s((1.0, 4.0, True)) == 1.0


def test_clocks_that_go_back_take_nothing_away():
    assert own_s((1.0, 1.0, True), (0.5, 0.5, True), (1.5, 1.5, True)) == 1.5


def test_process_waiting_for_a_disk_is_spared_for_a_while():
    assert own_s((0.0, 0.0, False), (1.0, 0.25, False), disk=True) == 0.25
    assert own_s((0.0, 0.0, False), (1.5, 0.0, False), (7.0, 0.0, False), disk=True) == 5.0
    assert own_s((1.0, 0.0, True), (7.0, 0.0, True), disk=True) == 0.0  # it waits for a core
