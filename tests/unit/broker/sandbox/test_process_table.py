import os

import pytest

from slipstream.broker.sandbox.process_table import ids_inside, parsed_row


def test_a_row_is_read_by_the_columns_that_the_kernel_names():
    """Columns of proc_pid_stat(5), counted from 1 there; each holds its own number here."""
    columns = [str(number) for number in range(1, 53)]
    columns[1], columns[2] = "(a) b) R)", "S"
    row = parsed_row(1, " ".join(columns).encode())
    ticks = os.sysconf("SC_CLK_TCK")
    assert (row.pid, row.parent, row.state, row.num_threads) == (1, 4, "S", 20)
    assert row.cpu_s == pytest.approx((14 + 15 + 16 + 17) / ticks)
    assert row.reaped_cpu_s == pytest.approx((16 + 17) / ticks)
    assert row.started_s == pytest.approx(22 / ticks)
    assert row.rss_bytes == 24 * os.sysconf("SC_PAGE_SIZE")


def test_processes_are_found_by_their_ids_in_a_namespace():
    ours, parent = os.getpid(), os.getppid()
    assert ids_inside([parent, ours, -1], levels=0) == {parent: parent, ours: ours}  # -1 has ended
    assert ids_inside([ours], levels=1) == {}
