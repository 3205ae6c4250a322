// Does staleness hurt: mismatch KL, effective sample size and clip fraction, by version lag where known.

import { Chart } from "/static/chart.js";
import { byId } from "/static/dom.js";
import { percent, percentByStep } from "/static/format.js";
import { lagColor, onTheme } from "/static/theme.js";

/** Return the series of a metric: one per lag (name@lagK), or the overall one. */
function seriesOf(view, name) {
  const { steps } = view;
  const lags = steps.names(`${name}@lag`).map(Number).sort((a, b) => a - b);
  if (!lags.length) return steps.get(name) ? [{ name: "all tokens", values: steps.get(name), color: "--c1" }] : [];
  const oldest = Math.max(view.status.max_staleness_steps, ...lags);
  return lags.map((lag) => ({ name: `lag ${lag}`, values: steps.get(`${name}@lag${lag}`), color: lagColor(lag, oldest) }));
}

export function create() {
  const charts = [
    ["staleness/mismatch_kl", new Chart(byId("kl-chart"), { title: "Mismatch KL", unit: "nats per token, learner against engine", axis: "step", low: 0 })],
    ["staleness/ess", new Chart(byId("ess-chart"), { title: "Effective sample size", unit: "share of tokens", axis: "step", high: 1, show: (v) => percent(v, 1), tick: percentByStep })],
    ["policy/clip_fraction", new Chart(byId("clip-chart"), { title: "Clip fraction", unit: "share of tokens", axis: "step", low: 0, show: (v) => percent(v, 2), tick: percentByStep })],
  ];
  let newest = null;
  const draw = () => { for (const [name, chart] of charts) chart.update(newest.steps.x, seriesOf(newest, name)); };
  onTheme(() => {
    if (!newest) return;
    draw();
    for (const [, chart] of charts) chart.rebuild();
  });
  return {
    show(view, news) {
      newest = view;
      if (news.has("steps")) draw();
    },
  };
}
