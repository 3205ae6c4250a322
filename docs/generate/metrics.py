"""The metrics reference, generated from wire/messages/metrics.py: names, units, labels, meanings.

python -m docs.generate.metrics > docs/metrics.md
"""

import sys

from slipstream.wire.messages.metrics import MetricName

_HEAD = """\
# Metrics

This page is generated from `wire/messages/metrics.py` (`python -m docs.generate.metrics`).

The broker serves the metrics of the whole run, of every role, at `/metrics` of its page, in the
text format of Prometheus. The port is `broker.dashboard.port`; set it, because 0 is another one in
every run. Reading needs the token of the page, which the run folder keeps, for its owner to read.
Each broker is one instance; name them if they are many:

```yaml
scrape_configs:
  - job_name: slipstream
    scrape_interval: 5s
    authorization:
      credentials_file: runs/NAME/dashboard/token  # is read anew at every scrape
    static_configs:
      - targets: ["127.0.0.1:9400"]
    relabel_configs:
      - target_label: instance
        replacement: NAME  # of the run
```

`deploy/grafana.json` is a dashboard over them: in Grafana, Dashboards, New, Import.
`deploy/alerts.yaml` has alerts for Prometheus, as one of its `rule_files`
([operations.md](operations.md#alerts)).

A counter falls where the run goes back to an earlier step; Prometheus takes that for a restart.

| metric | kind | unit | labels | meaning |
|---|---|---|---|---|
"""


def reference() -> str:
    """Return the whole page."""
    return _HEAD + "".join(f"{_row(name)}\n" for name in MetricName)


def _row(name: MetricName) -> str:
    labels = ", ".join(f"`{label}`" for label in name.labels) or "none"
    return f"| `{name.exported}` | {name.kind} | {name.unit} | {labels} | {name.meaning} |"


def main() -> int:
    """Print the page."""
    sys.stdout.write(reference())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
