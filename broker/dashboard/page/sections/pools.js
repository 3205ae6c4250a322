// Waiting pools: a lane per process, tokens/s, queue depth and age.

import { Chart } from "/static/chart.js";
import { byId } from "/static/dom.js";
import { duration, fixed } from "/static/format.js";
import { Lanes } from "/static/lanes.js";

const ORDER = ["learner", "generator", "reward", "relay", "broker"];
const DEPTHS = [["ready_groups", "--c1", "ready"], ["leased_groups", "--c2", "leased"], ["waiting_for_reward", "--c4", "to score"],
  ["being_scored", "--c6", "scoring"]];
const ROLES = [["generator", "--c2", "generators"], ["learner", "--c1", "learner"]];

/** Return the processes that have a lane, the learner first. */
function processes(view) {
  const role = new Map(view.status.roles.map((one) => [one.name, one.role]));
  const place = (name) => {
    const at = ORDER.findIndex((start) => (role.get(name) ?? name).startsWith(start));
    return at < 0 ? ORDER.length : at;
  };
  return view.time.names("busy:").sort((a, b) => place(a) - place(b) || a.localeCompare(b, "en", { numeric: true }));
}

export function create() {
  const lanes = new Lanes(byId("lanes"));
  const rate = new Chart(byId("rate-chart"), { title: "Tokens per second", unit: "tokens/s by role", axis: "time", low: 0,
    show: (value) => fixed(value), whole: true });
  const depth = new Chart(byId("depth-chart"), { title: "Queue depth", unit: "groups; answers to score",
    axis: "time", low: 0, show: (value) => fixed(value), whole: true });
  const age = new Chart(byId("age-chart"), { title: "Age of the oldest ready group", unit: "seconds", axis: "time", low: 0, show: duration });
  return {
    show(view, news) {
      const text = view.status.waiting_for;
      byId("waiting").hidden = !text;
      if (text) byId("waiting").textContent = `The learner waits for ${text}.`;
      if (!news.has("time")) return;
      const { time } = view;
      lanes.update(time.x, processes(view).map((name) => ({ name, values: time.get(`busy:${name}`) })));
      const of = (prefix, list) => list.filter(([name]) => time.get(prefix + name))
        .map(([name, color, text]) => ({ name: text, values: time.get(prefix + name), color, gaps: true }));
      rate.update(time.x, of("tokens:", ROLES));
      depth.update(time.x, of("queue:", DEPTHS));
      age.update(time.x, time.get("queue_age_s") ? [{ name: "oldest", values: time.get("queue_age_s"), color: "--c3", gaps: true }] : []);
    },
  };
}
