// Does the policy get better: evaluation and training reward, entropy, answer length.

import { Chart } from "/static/chart.js";
import { byId, changes, fillTable } from "/static/dom.js";
import { fixed, meanReward, percent, percentByStep, words } from "/static/format.js";

/** Return steps and evaluations over one axis: [x, of(name), evaluation values]. */
function together(view) {
  const { steps, status } = view;
  const rounds = new Map(status.eval.map((round) => [round.step, meanReward(round.overall)]));
  const x = [...new Set([...steps.x, ...rounds.keys()])].sort((a, b) => a - b);
  const row = new Map(steps.x.map((step, i) => [step, i]));
  const of = (name) => {
    const values = steps.get(name);
    return values ? x.map((step) => (row.has(step) ? values[row.get(step)] : null)) : null;
  };
  return [x, of, x.map((step) => rounds.get(step) ?? null)];
}

function sources(s) {
  const newest = s.eval.at(-1);
  byId("evaluation").hidden = !newest;
  if (!newest) return;
  const names = Object.keys(newest.overall.metrics);
  const row = (title, one) => [title, fixed(one.num_problems), fixed(one.num_answers), fixed(one.num_dropped),
    ...names.map((name) => (name in one.metrics ? fixed(one.metrics[name], 3) : "-"))];
  const parts = Object.entries(newest.by_source);
  fillTable(byId("sources"), ["data source", "problems", "answers", "dropped", ...names.map(words)],
    [...parts.map(([name, one]) => row(name, one)), ...(parts.length > 1 ? [row("all", newest.overall)] : [])]);
  byId("evaluated").textContent = `Answers begun at step ${newest.step}.`;
}

export function create() {
  const differs = changes();
  const reward = new Chart(byId("reward-chart"), { title: "Reward", unit: "mean per answer", axis: "step", height: 210 });
  const entropy = new Chart(byId("entropy-chart"), { title: "Entropy", unit: "nats per token", axis: "step", low: 0, height: 210 });
  const length = new Chart(byId("length-chart"), { title: "Answer length", unit: "tokens", axis: "step", low: 0, height: 210 });
  const turns = new Chart(byId("turns-chart"), { title: "Turns", unit: "per trajectory", axis: "step", low: 0 });
  const branched = new Chart(byId("branched-chart"), { title: "Rewritten histories", unit: "share of trajectories with branches", axis: "step", low: 0, show: (v) => percent(v, 1), tick: percentByStep });
  return {
    show(view, news) {
      if (!news.has("steps")) return;
      const [x, of, evaluations] = together(view);
      const rewards = [["trained answers", "reward/mean", "--c2"], ["all sampled answers", "reward/sampled", "--c3"]]
        .filter(([, name]) => of(name)).map(([name, key, color]) => ({ name, values: of(key), color }));
      const rounds = view.status.eval.length ? [{ name: view.sampling ? `evaluation (${view.sampling})` : "evaluation", values: evaluations, color: "--c1", dots: true }] : [];
      reward.update(x, [...rewards, ...rounds]);
      const { steps } = view;
      const one = (name, key, color) => (steps.get(key) ? [{ name, values: steps.get(key), color }] : []);
      entropy.update(steps.x, one("entropy", "policy/entropy", "--c4"));
      const cut = steps.get("response/truncated");
      length.update(steps.x, one("mean", "response/tokens", "--c6"), { note: cut ? (i) => `${percent(cut[i], 1)} cut off` : null });
      const several = (steps.get("turns/max") ?? []).some((count) => count > 1);
      byId("turns-chart").hidden = byId("branched-chart").hidden = !several;
      turns.update(steps.x, [...one("mean", "turns/mean", "--c1"), ...one("largest", "turns/max", "--c2")]);
      branched.update(steps.x, one("branched", "turns/branched", "--c4"));
      if (differs("sources", view.status.eval.at(-1))) sources(view.status);
    },
  };
}
