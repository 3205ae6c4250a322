// How old the trained data is, what is on its way, and what is dropped for its age.

import { Chart } from "/static/chart.js";
import { bars, byId, changes, fillTable, setText } from "/static/dom.js";
import { fixed, percent, plural, sum, words } from "/static/format.js";
import { lagColor, onTheme } from "/static/theme.js";
import { showLag } from "/static/trajectory.js";

const holds = (id) => byId(id).querySelector(".holds");

function histogram(s) {
  const total = sum(s.staleness_histogram);
  const oldest = Math.max(s.max_staleness_steps, ...Object.keys(s.staleness_histogram).map(Number));
  const most = Math.max(...Object.values(s.staleness_histogram));
  const rows = Array.from({ length: total ? oldest + 1 : 0 }, (_, lag) => {
    const tokens = s.staleness_histogram[lag] ?? 0;
    return { key: lag, name: plural(lag, "step"), share: tokens / most, color: lagColor(lag, oldest),
      value: `${percent(tokens / total, 1)} (${fixed(tokens)})`, act: () => showLag(lag), hint: `Recorded trajectories with tokens of staleness ${lag}` };
  });
  bars(holds("histogram"), rows, "No token is trained yet.");
}

function drops(s) {
  const known = Object.entries(s.dropped).filter(([, count]) => count).sort((a, b) => b[1] - a[1]);
  bars(holds("drops"), known.map(([reason, count]) => ({
    key: reason, name: words(reason), share: count / known[0][1], value: `${fixed(count)} (${percent(count / s.issued, 1)})` })), "Nothing is dropped.");
}

function survivors(s) {
  const { quartiles, alarm, generated_mean: all, trained_mean: trained } = s.survivorship;
  const share = (q) => (q.trajectories ? q.dropped_for_age / q.trajectories : 0);
  const whole = Math.max(0.02, ...quartiles.map(share));
  bars(holds("survivors"), quartiles.map((q, i) => ({
    key: i, name: `${fixed(i ? quartiles[i - 1].up_to_tokens + 1 : 1)} to ${fixed(q.up_to_tokens)} tokens`, share: share(q) / whole,
    value: `${percent(share(q), 1)} of ${fixed(q.trajectories)}` })), "No answer is trained or dropped yet.");
  const lengths = `Mean length ${fixed(all, 1)} tokens of all answers, ${fixed(trained, 1)} of the trained ones.`;
  setText(byId("survivors-note"), alarm || (all ? lengths : ""));
  byId("survivors-note").classList.toggle("bad", alarm !== "");
}

/** Show what a staleness target holds back, and why. */
function target(throttle, most) {
  byId("target").hidden = !throttle;
  if (!throttle) return;
  const { excess } = throttle;
  const figure = excess === null ? "not known since its last change" : `${fixed(excess, 2)} times the target`;
  setText(byId("target-note"), `${throttle.target}: bound in force ${throttle.bound} of ${most}, `
    + `at most ${fixed(throttle.in_flight)} of ${fixed(throttle.most_in_flight)} groups under way; the figure is ${figure}.`);
  fillTable(byId("target-changes"), ["learner step", "bound in force", "groups", "why"],
    [...throttle.changes].reverse().map((one) => [fixed(one.step), fixed(one.bound), fixed(one.in_flight), one.reason]));
}

/** Return one series per lag under a prefix, oldest lag last. */
function byLag(view, prefix) {
  const lags = view.time.names(prefix).map(Number).sort((a, b) => a - b);
  const bound = Math.max(view.status.max_staleness_steps, ...lags);
  return lags.map((lag) => ({ name: plural(lag, "step"), values: view.time.get(prefix + lag), color: lagColor(lag, bound), gaps: true }));
}

export function create() {
  const differs = changes();
  const options = { unit: "groups by their present lag in learner steps", axis: "time", stacked: true, low: 0, show: (v) => fixed(v), whole: true };
  const flight = new Chart(byId("flight-chart"), { title: "In flight by lag", ...options });
  const queue = new Chart(byId("queue-chart"), { title: "Ready in the queue by lag", ...options });
  let newest = null;
  const charts = (view) => {
    flight.update(view.time.x, byLag(view, "staleness_in_flight:"));
    queue.update(view.time.x, byLag(view, "staleness_queue:"));
  };
  onTheme(() => {
    if (!newest) return;
    histogram(newest.status);
    charts(newest);
    for (const chart of [flight, queue]) chart.rebuild();
  });
  return {
    show(view, news) {
      const s = view.status;
      newest = view;
      if (differs("histogram", s.staleness_histogram)) histogram(s);
      if (differs("dropped", [s.dropped, s.issued])) drops(s);
      if (differs("target", s.throttle)) target(s.throttle, s.max_staleness_steps);
      if (differs("survivors", s.survivorship)) survivors(s);
      if (news.has("time")) charts(view);
    },
  };
}
