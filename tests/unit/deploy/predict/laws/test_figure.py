from slipstream.deploy.predict.laws.figure import Figure, total


def test_figures_add_up():
    assert total([Figure("a", 1.5, "s", "x"), Figure("b", 2.0, "s", "y")]) == 3.5
