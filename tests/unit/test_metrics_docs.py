"""docs/metrics.md and the Grafana dashboard name the metrics that there are, and no others."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs.generate.metrics import reference
from slipstream.broker.advisories.view import Advisory
from slipstream.broker.dashboard.metrics import render_metrics
from slipstream.wire.messages.metrics import MetricName
from tests.support.wire_samples import STATUS

ROOT = Path(__file__).parents[2]
GRAFANA: dict[str, Any] = json.loads((ROOT / "deploy" / "grafana.json").read_text("utf-8"))
ALERTS: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((ROOT / "deploy" / "alerts.yaml").read_text("utf-8"))["groups"]
    for rule in group["rules"]
]
PANELS = [panel for panel in GRAFANA["panels"] if panel["type"] != "row"]
EXPORTED = {name.exported: name for name in MetricName}
PROMETHEUS_OWN = {"job", "instance"}  # labels that the scraper adds
SELECTOR = re.compile(r"(slipstream_[a-z_]+)(?:\{([^}]*)\})?")
GROUPED = re.compile(r"by \(([^)]*)\)")


def expressions() -> list[str]:
    targets = (target for panel in PANELS for target in panel["targets"])
    variables = (v["definition"] for v in GRAFANA["templating"]["list"] if "definition" in v)
    return [*(target["expr"] for target in targets), *variables]


def test_metrics_document_is_up_to_date():
    document = (ROOT / "docs" / "metrics.md").read_text("utf-8")
    assert document == reference(), "run `python -m docs.generate.metrics > docs/metrics.md`"


@pytest.mark.parametrize("name", list(MetricName))
def test_every_metric_has_a_name_a_unit_and_a_meaning(name: MetricName):
    assert re.fullmatch(r"slipstream_[a-z_]+", name.value)
    assert not name.value.endswith("_total")
    assert name.unit
    assert len(name.meaning) > 10
    if name.unit in {"seconds", "bytes"}:
        assert name.value.endswith(f"_{name.unit}")


def test_what_is_served_has_the_kinds_and_labels_that_are_documented():
    advisory = Advisory(rule="broker-gone", level="error", text="t", setting="s", why="broker-gone")
    text = render_metrics(STATUS, [advisory])[0].decode()
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, flags=re.MULTILINE))
    samples = re.findall(r"^(slipstream_\w+)(?:\{(.*)\})? ", text, flags=re.MULTILINE)
    served = {name for name, _ in samples if name in EXPORTED}
    assert {name for name, _ in samples} == served
    for name, labels in samples:
        assert kinds[name] == EXPORTED[name].kind
        assert set(re.findall(r'(\w+)="', labels)) == set(EXPORTED[name].labels)
    absent = {"slipstream_queue_age_seconds", "slipstream_memory_bytes"}
    assert set(EXPORTED) - served <= absent | {"slipstream_groups_waiting"}


def test_every_metric_of_the_dashboard_exists_and_has_the_labels_it_is_asked_for():
    for expression in expressions():
        found = SELECTOR.findall(expression)
        assert found, expression
        for name, selector in found:
            assert name in EXPORTED, f"{name} in {expression}"
            asked = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector))
            assert asked <= {*EXPORTED[name].labels, *PROMETHEUS_OWN}, expression
        grouped = {one.strip() for group in GROUPED.findall(expression) for one in group.split(",")}
        assert grouped <= set(EXPORTED[found[0][0]].labels), expression


def test_every_metric_is_on_the_dashboard():
    shown = {name for expression in expressions() for name, _ in SELECTOR.findall(expression)}
    over_the_run = {"slipstream_role_busy_ratio"}  # the dashboard has the share of the last minute
    labeled = {"slipstream_publishes_total", "slipstream_evaluation_step"}
    for_alerts = {"slipstream_advisory"}  # the page has its text
    facts = {"slipstream_build_info", "slipstream_run_info"}  # to join with by PromQL
    assert set(EXPORTED) - shown == over_the_run | labeled | for_alerts | facts


def test_the_dashboard_can_be_imported_and_its_panels_do_not_overlap():
    assert GRAFANA["schemaVersion"] >= 39
    assert {"title", "uid", "panels", "templating", "time"} <= set(GRAFANA)
    ids = [panel["id"] for panel in GRAFANA["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in GRAFANA["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
    for panel in PANELS:
        assert panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs)


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: str(alert["alert"]))
def test_an_alert_asks_for_metrics_that_there_are_and_names_its_section(alert: dict[str, Any]):
    for name, selector in SELECTOR.findall(alert["expr"]):
        assert name in EXPORTED
        asked = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector))
        assert asked <= {*EXPORTED[name].labels, *PROMETHEUS_OWN}
    assert alert["labels"]["severity"] in {"page", "ticket"}
    assert re.fullmatch(r"\d+[mh]", alert["for"])
    guide = (ROOT / "docs" / "operations.md").read_text("utf-8")
    headings = re.findall(r"^#+ (.+)$", guide, flags=re.MULTILINE)
    anchors = {re.sub(r"[^a-z0-9 -]", "", h.lower()).replace(" ", "-") for h in headings}
    section = alert["annotations"]["section"].partition("docs/operations.md#")[2]
    assert section in {*anchors, "{{ $labels.rule }}"}


def test_a_run_that_began_just_now_is_not_called_stuck():
    """`increase` over two hours is 0 after two scrapes: there must be a sample of two hours ago."""
    (stuck,) = (alert["expr"] for alert in ALERTS if alert["alert"] == "SlipstreamNoStep")
    (window,) = re.findall(r"increase\(slipstream_learner_steps_total\[(\w+)\]\) == 0", stuck)
    assert f"and slipstream_learner_steps_total offset {window} >= 0" in stuck
