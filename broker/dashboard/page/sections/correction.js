// Does staleness hurt: how tokens of each version lag weigh, over time and in the newest step.

import { Chart } from "/static/chart.js";
import { byId, fillTable, setText } from "/static/dom.js";
import { figure, fixed, percent, percentByStep, plural } from "/static/format.js";
import { lagColor, onTheme } from "/static/theme.js";

const share = (value) => percent(value, 2);
const TOKENS = "policy/tokens";
const COLUMNS = [ // of the table, after the tokens
  ["mismatch KL", "staleness/mismatch_kl", figure], ["ESS", "staleness/ess", (v) => percent(v, 1)],
  ["ratio", "policy/ratio", (v) => fixed(v, 4)], ["largest ratio", "policy/ratio_max", figure],
  ["clip up", "policy/clip_up", share], ["clip down", "policy/clip_down", share], ["dual clip", "policy/clip_dual", share],
  ["masked", "staleness/masked", share], ["entropy", "policy/entropy", figure], ["reward variance", "reward/group_variance", figure],
];

/** Return the series of a metric: one per lag (name@lagK), or the overall one. */
function seriesOf(view, name) {
  const { steps } = view;
  const lags = steps.names(`${name}@lag`).map(Number).sort((a, b) => a - b);
  if (!lags.length) return steps.get(name) ? [{ name: "all tokens", values: steps.get(name), color: "--c1" }] : [];
  const oldest = Math.max(view.status.max_staleness_steps, ...lags);
  return lags.map((lag) => ({ name: `lag ${lag}`, values: steps.get(`${name}@lag${lag}`), color: lagColor(lag, oldest) }));
}

function table({ steps, status }) {
  const of = (name) => steps.get(name)?.at(-1) ?? null;
  const row = (title, suffix) => {
    const tokens = of(TOKENS + suffix);
    return [title, tokens === null ? "-" : `${fixed(tokens)} (${percent(tokens / of(TOKENS), 1)})`,
      ...COLUMNS.map(([, name, show]) => show(of(name + suffix)))];
  };
  const lags = steps.names(`${TOKENS}@lag`).map(Number);
  const rows = lags.length ? Math.max(status.max_staleness_steps, ...lags) + 1 : 0;
  const isKnown = of(TOKENS) !== null;
  fillTable(byId("by-lag"), ["lag", "tokens", ...COLUMNS.map(([title]) => title)],
    isKnown ? [...Array.from({ length: rows }, (_, lag) => row(plural(lag, "step"), `@lag${lag}`)), row("all", "")] : []);
  setText(byId("by-lag-note"), isKnown ? `Of step ${steps.x.at(-1)}. The variance of rewards is that of groups whose oldest token has this lag.` : "No values yet.");
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
      if (!news.has("steps")) return;
      draw();
      table(view);
    },
  };
}
