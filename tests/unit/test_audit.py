from typing import Any

import pytest

from tests.audit import UnreachableError, holes, installed


def package(name: str, *ids: str) -> dict[str, Any]:
    vulns = [{"id": one, "aliases": [f"CVE-{one}"], "fix_versions": ["2"]} for one in ids]
    return {"name": name, "version": "1", "vulns": vulns}


MISSED = {"name": "c", "skip_reason": "Dependency not found on PyPI"}


def test_a_hole_is_named_unless_it_is_accepted_under_any_of_its_names():
    report = {"dependencies": [package("a", "1", "2"), package("b"), MISSED]}
    assert holes(report, {}) == ["a 1: 1 ['CVE-1'], mended in 2", "a 1: 2 ['CVE-2'], mended in 2"]
    assert holes(report, {"CVE-1": "not called", "2": "not called"}) == []


def test_audit_that_found_no_package_reports_no_success():
    with pytest.raises(
        UnreachableError, match=r"none of 2 packages was found: .*not found on PyPI"
    ):
        holes({"dependencies": [MISSED, MISSED]}, {})


def test_what_is_installed_counts_as_its_release():
    found = installed()
    assert found["torch"].count("+") == 0
    assert "slipstream" not in found
