// How far a step takes the policy: clips, masks and ratios; reference, teacher and critic where there are any.

import { Chart } from "/static/chart.js";
import { byId } from "/static/dom.js";
import { fixed, percent, percentByStep } from "/static/format.js";

const POLICY = [
  ["clipped-chart", { title: "Clipped and masked", unit: "share of tokens", axis: "step", low: 0, show: (v) => percent(v, 2), tick: percentByStep },
    [["up", "policy/clip_up", "--c1"], ["down", "policy/clip_down", "--c2"], ["dual", "policy/clip_dual", "--c5"], ["masked", "staleness/masked", "--c8"]]],
  ["ratio-chart", { title: "Ratio, mean", unit: "pi / anchor", axis: "step", low: 0.998, high: 1.002, show: (v) => fixed(v, 4) },
    [["mean", "policy/ratio", "--c1"]]],
  ["ratio-max-chart", { title: "Ratio, largest", unit: "of any token", axis: "step", low: 0 }, [["largest", "policy/ratio_max", "--c5"]]],
];
const FLAT = 1e-6;
const OPTIONAL = [ // hidden in a run that has no such figures
  ["reference-chart", { title: "KL of the policy", unit: "nats per token", axis: "step", low: 0 },
    [["reference", "policy/kl_reference", "--c4"], ["behavior", "policy/kl_behavior", "--c1"], ["teacher", "policy/kl_teacher", "--c3"]]],
  ["explained-chart", { title: "Explained variance", unit: "of returns", axis: "step", low: 0, high: 1 },
    [["explained", "critic/explained_variance", "--c3"]]],
  ["critic-loss-chart", { title: "Critic loss", unit: "per minibatch", axis: "step", low: 0 }, [["loss", "critic/loss", "--c6"]]],
  ["value-chart", { title: "Value and return", unit: "mean per token", axis: "step" },
    [["value", "critic/value", "--c1"], ["return", "critic/return", "--c2"]]],
];

/** Whether the policy's ratios are all 1 and no token was clipped or masked: three flat lines. */
export function isFlat(steps) {
  const all = (key, value, within) => (steps.get(key) ?? []).every((v) => v == null || Math.abs(v - value) <= within);
  const none = ["policy/clip_up", "policy/clip_down", "policy/clip_dual", "staleness/masked"];
  return Boolean(steps.get("policy/ratio")?.length) && ["policy/ratio", "policy/ratio_max"].every((key) => all(key, 1, FLAT)) && none.every((key) => all(key, 0, 0));
}

export function create() {
  const charts = [...POLICY, ...OPTIONAL].map(([id, options, lines]) => [new Chart(byId(id), options), lines]);
  return {
    show({ steps }, news) {
      if (!news.has("steps")) return;
      const flat = isFlat(steps);
      byId("trust-flat").hidden = !flat;
      charts.forEach(([chart, lines], place) => {
        const known = lines.filter(([, key]) => steps.get(key));
        chart.host.hidden = place >= POLICY.length ? !known.length : flat;
        chart.update(steps.x, known.map(([name, key, color]) => ({ name, values: steps.get(key), color })));
      });
    },
  };
}
