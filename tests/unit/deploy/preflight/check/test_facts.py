from slipstream.deploy.preflight.check.facts import HostReport, exit_code, fail, ok, warn


def test_a_fact_is_one_line_with_its_setting_once():
    assert ok("clock", "one host").line == "ok   clock: one host"
    assert warn("fsync", "slow\n  disk", "run.dir").line == "warn fsync: slow disk (run.dir)"
    assert fail("model", "no model (run.model)", "run.model").line == (
        "fail model: no model (run.model)"
    )


def test_the_worst_fact_of_any_host_decides_the_exit_code():
    good, bad, worst = ok("a", ""), warn("b", ""), fail("c", "")

    def code(*facts: tuple[object, ...]) -> int:
        return exit_code(HostReport(host="h", roles=(), facts=of_one) for of_one in facts)  # type: ignore[arg-type]

    assert [code(), code((good,)), code((good,), (bad, good)), code((worst,), (bad,))] == [
        0,
        0,
        1,
        2,
    ]
