// Is anything lost: the conservation equation, groups by state, holders of work and lost processes.

import { byId, changes, element, fillTable } from "/static/dom.js";
import { bytes, duration, fixed, label, percent, sum, words } from "/static/format.js";

export const SILENT_S = 1.5; // workers report twice a second
const GONE_S = 10;
const LATE_S = 1; // a process silent for this long counts on between two events
const RECENT_S = 10;

/** Return the seconds since a process's last message. */
export const silence = (view, role) => role.silent_s + (role.silent_s >= LATE_S ? (performance.now() - view.toldAt) / 1000 : 0);

/** Return in how many seconds the next process passes the limit if it stays silent; Infinity if none is late. */
export const nextSilent = ({ status }) => Math.min(Infinity, ...status.roles.map((role) => role.silent_s)
  .filter((silent) => silent >= LATE_S && silent < SILENT_S).map((silent) => SILENT_S - silent));

/** Return "alive", "silent" or "gone" by the time since a process's last message. */
export function life(silent) {
  if (silent >= GONE_S) return "gone";
  return silent >= SILENT_S ? "silent" : "alive";
}

function equation(name, { issued, trained, dropped, in_flight: flying }, lost) {
  const part = (text, value, bad) => element("span", { class: bad ? "part bad" : "part" },
    element("b", { text: fixed(value) }), element("span", { text }));
  const sign = (text) => element("span", { class: "sign", text });
  return element("p", { class: "equation", id: `equation-${name}` }, part(`${name} issued`, issued), sign("="), part("trained", trained),
    sign("+"), part("dropped", dropped), sign("+"), part("in flight", flying), sign(";"),
    part("unaccounted", lost, lost !== 0));
}

function counts(id, head, entries, none) {
  fillTable(byId(id), head, entries.length ? entries : [[none, ""]]);
}

/** Return where a process spends its time, the three largest parts. */
function spends(phases) {
  const total = sum(phases);
  return Object.entries(phases).filter(([, s]) => s > 0).sort((a, b) => b[1] - a[1]).slice(0, 3)
    .map(([name, seconds]) => `${name} ${percent(seconds / total)}`).join(", ");
}

/** Return how busy each process was lately, by name; null is unknown. */
const lately = ({ time, status }) => {
  const rows = time.window(RECENT_S);
  return new Map(status.roles.map(({ name }) => [name, time.recent(`busy:${name}`, rows)]));
};

/** Return how many trajectories of a generator environments answer, and the share of their time that they took. */
function environments(one) {
  const total = (one.engine_s ?? 0) + (one.environment_s ?? 0);
  return one.acting == null ? "-" : `${fixed(one.acting)}${total > 0 ? ` (${percent(one.environment_s / total)})` : ""}`;
}

/** Return the failures of all environments as a row, where there are any environments. */
const failures = ({ roles }) => (roles.some((one) => one.acting != null)
  ? [["environment failures", fixed(roles.reduce((all, one) => all + (one.environment_failed ?? 0), 0))]] : []);

/** Return the GPU memory of a process, and how busy its GPUs were, for whomever. */
const gpuOf = (one) => (one.gpu_bytes == null ? "-" : `${bytes(one.gpu_bytes)}${one.gpu_busy == null ? "" : ` (${percent(one.gpu_busy)})`}`);

function workers(s, states, live, busy) {
  if (!s.roles.length) {
    fillTable(byId("workers"), ["process"], [["No process has reported yet."]]);
    return;
  }
  const acts = s.roles.some((one) => one.acting != null), gpus = s.roles.some((one) => one.gpu_bytes != null);
  fillTable(byId("workers"), ["process", "role", "state", ...(live ? ["busy now"] : []), "busy since its start", "tokens/s since its start", "weights", "leases", "answers in the engine", ...(acts ? ["in environments (of their time)"] : []), "KV cache",
    "CPU cores", "memory", ...(gpus ? ["GPU memory (busy)"] : []), "last heard", "spends its time on, since its start"],
    s.roles.map((one, i) => {
      const state = states[i];
      return [one.name, words(one.role), element("span", { class: "tag", "data-state": state, text: state }),
        ...(live ? [percent(busy.get(one.name))] : []), percent(one.busy),
        one.tokens_per_second ? fixed(one.tokens_per_second) : "-", label(one.adopted), fixed(one.leases ?? 0),
        one.sequence_limit ? `${fixed(one.sequences)} of ${fixed(one.sequence_limit)}` : "-",
        ...(acts ? [environments(one)] : []), one.kv_use == null ? "-" : percent(one.kv_use),
        one.cpu_cores == null ? "-" : fixed(one.cpu_cores, 2), one.memory_bytes == null ? "-" : bytes(one.memory_bytes),
        ...(gpus ? [gpuOf(one)] : []),
        one.silent_s < 1 ? "now" : `${duration(one.silent_s)} ago`,
        element("span", { class: "text", text: spends(one.phase_seconds) })];
    }));
}

export function create() {
  const differs = changes();
  return {
    show(view) {
      const { status: s, live } = view;
      const groups = { issued: s.issued, trained: s.trained, dropped: sum(s.dropped), in_flight: sum(s.in_flight) };
      const t = s.trajectories;
      if (differs("equation", [groups, s.unaccounted, t])) {
        const answers = "trained" in t ? [equation("trajectories", t, t.issued - t.trained - t.dropped - t.in_flight)] : [];
        byId("equations").replaceChildren(equation("groups", groups, s.unaccounted), ...answers);
      }
      const rows = (values) => Object.entries(values).map(([name, count]) => [words(name), fixed(count)]);
      if (differs("flying", s.in_flight)) counts("flying", ["state", "groups"], rows(s.in_flight), "nothing");
      if (differs("dropped", s.dropped)) counts("dropped", ["reason", "groups"], rows(s.dropped), "nothing is dropped");
      const failed = failures(s);
      if (differs("queues", [s.queue, s.sealed, s.requeued, failed])) {
        counts("queues", ["what", "count"], [...rows(s.queue), ...failed, ["sealed by a checkpoint", fixed(s.sealed)], ["generated again", fixed(s.requeued)]]);
      }
      const busy = lately(view);
      const states = s.roles.map((one) => (live ? life(silence(view, one)) : "ended"));
      if (differs("workers", [s.roles, states, [...busy.values()]])) workers(s, states, live, busy);
    },
  };
}
