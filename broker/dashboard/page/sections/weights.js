// Which version runs where: the publishes with their phases, the version of each engine.

import { Chart } from "/static/chart.js";
import { byId, changes, element, fillTable } from "/static/dom.js";
import { bytes, duration, fixed, label, plural } from "/static/format.js";

const MOST = 60; // publishes on the chart
const MOST_ENGINES = 8; // on the chart, and named in the words about a publish
const PHASES = ["digest", "offer", "group", "receive", "stage", "prove", "expect", "order", "pause", "transfer", "load", "verify", "commit"];
const COLORS = ["--c8", "--c7", "--c6", "--c1", "--c2", "--c4", "--c3", "--c5"];

/** Describe the engines that adopted a publish, those left out and those that compute something else. */
export function outcome(record) {
  const failed = Object.entries(record.failed ?? {}).map(([name, why]) => `${name} left out (${why})`);
  const rest = failed.length > MOST_ENGINES ? [`${failed.length - MOST_ENGINES} more left out`] : [];
  const fetched = Math.max(0, ...Object.values(record.fetched_bytes ?? {}));
  const share = fetched && fetched < record.num_bytes ? `, of which at most ${bytes(fetched)} were fetched` : "";
  const size = record.num_bytes ? bytes(record.num_bytes) + share : "";
  const held = Object.entries(record.quarantined ?? {}).map(([name, why]) => `${name} quarantined (${why})`);
  return [size, adopters(Object.entries(record.adopted_by)), ...failed.slice(0, MOST_ENGINES), ...rest, ...held.slice(0, MOST_ENGINES)].filter(Boolean).join("; ");
}

function adopters(engines) {
  if (!engines.length) return "adopted by no engine";
  if (engines.length <= MOST_ENGINES) return `adopted by ${engines.map(([name, seconds]) => `${name} in ${duration(seconds)}`).join(", ")}`;
  const seconds = engines.map(([, spent]) => spent);
  return `adopted by ${engines.length} engines in ${duration(Math.min(...seconds))} to ${duration(Math.max(...seconds))}`;
}

const isLeftOut = (record) => Object.keys(record.failed ?? {}).length > 0;
const isQuarantined = (record) => Object.keys(record.quarantined ?? {}).length > 0;

function series(records) {
  const known = new Set(records.flatMap((record) => Object.keys(record.phase_seconds ?? {})));
  const order = [...PHASES.filter((name) => known.has(name)), ...[...known].filter((name) => !PHASES.includes(name)).sort()];
  return order.map((name, i) => ({ name, values: records.map((record) => record.phase_seconds?.[name] ?? 0), color: COLORS[i % COLORS.length] }));
}

// The learner's progress at that time gives its step; the engines are compared with that. Of many
// those are shown that are the furthest behind now, which one without a version is.
function behind(view) {
  const { time, status } = view;
  const trained = time.get("trained") ?? [];
  const step = trained.map((groups) => (groups === null ? null : Math.floor(groups / status.groups_per_step)));
  const byName = (a, b) => a.localeCompare(b, "en", { numeric: true });
  const names = time.names("version:");
  const now = new Map(names.map((name) => [name, time.get(`version:${name}`).at(-1) ?? -1]));
  const shown = names.sort((a, b) => now.get(a) - now.get(b) || byName(a, b)).slice(0, MOST_ENGINES).sort(byName);
  const engines = shown.map((name, i) => ({
    name, color: `--c${i + 1}`, gaps: true,
    values: time.get(`version:${name}`).map((version, row) => (version === null || step[row] == null ? null : Math.max(0, step[row] - version))) }));
  return [engines, names.length > shown.length ? `The ${shown.length} of ${names.length} engines that are the furthest behind.` : ""];
}

function members(s) {
  const now = Date.now() / 1000;
  const rows = s.members.map((one) => [one.name,
    element("span", { class: "tag", "data-state": one.state, text: one.state }), label(one.version),
    Math.max(0, now - one.since_s) < 30 * 86400 ? `${duration(Math.max(0, now - one.since_s))} ago` : new Date(one.since_s * 1000).toISOString().slice(0, 16).replace("T", " "),
    one.transport, element("span", { class: "text", text: one.reason || "" })]);
  if (rows.length) fillTable(byId("members"), ["engine", "state", "version", "since", "transport", "reason"], rows);
  else fillTable(byId("members"), ["engine"], [["No engine is known yet."]]);
}

export function create() {
  const differs = changes();
  let records = [];
  const publishes = new Chart(byId("publish-chart"), { title: "Publishes", unit: "seconds by phase, slowest engine", stacked: true, bars: true,
    axis: { title: "version", tick: (i) => (Number.isInteger(i) && records[i] ? label(records[i].version) : ""),
      hover: (i) => (records[i] ? label(records[i].version) : "") },
    show: (value) => `${fixed(value, value < 0.1 ? 3 : 2)} s`,
    height: 190 });
  const versions = new Chart(byId("version-chart"), { title: "Engines behind the learner", unit: "learner steps since the version that it runs",
    axis: "time", low: 0, show: (value) => fixed(value), whole: true, stepped: true, height: 190 });
  return {
    show(view, news) {
      const s = view.status;
      if (differs("publishes", [s.publish_history.length, s.publish_history.slice(-3)])) {
        records = s.publish_history.slice(-MOST);
        const left = records.filter((record) => isLeftOut(record)).length;
        const held = records.filter((record) => isQuarantined(record)).length;
        const rest = [left ? `An engine was left out of ${left} of these ${plural(records.length, "publish", "publishes")}.` : "",
          held ? `An engine was quarantined at ${held} of them: it did not compute what the learner does.` : ""];
        publishes.update(records.map((_, i) => i), series(records), { note: (i) => outcome(records[i]),
          marked: (i) => isLeftOut(records[i]) || isQuarantined(records[i]), rest: rest.filter(Boolean).join(" ") });
      }
      if (differs("members", [s.members, Math.floor(s.elapsed_s / 5)])) members(s);
      if (!news.has("time")) return;
      const [engines, rest] = behind(view);
      versions.update(view.time.x, engines, { rest });
    },
  };
}
