// The run at a glance: six figures that answer the questions, and what to change.

import { SILENT_S } from "/static/accounting.js";
import { byId, changes, element } from "/static/dom.js";
import { duration, fixed, meanOf, percent, sum } from "/static/format.js";

const RECENT = 30; // time samples

/** Return the mean share of its time that a role was busy lately, or over the run. */
export function busyOf(view, role) {
  const names = view.status.roles.filter((one) => one.role === role).map((one) => one.name);
  const known = names.map((name) => view.time.recent(`busy:${name}`, RECENT)).filter((share) => share !== null);
  if (known.length && view.live) return known.reduce((a, b) => a + b, 0) / known.length;
  return view.status.busy[role] ?? null;
}

/** Return the mean staleness of the trained tokens in learner steps, or null. */
export function meanStaleness(histogram) {
  const total = sum(histogram);
  if (!total) return null;
  return Object.entries(histogram).reduce((all, [lag, tokens]) => all + Number(lag) * tokens, 0) / total;
}

function evaluation(s) {
  const newest = s.eval.at(-1);
  if (!newest) return ["-", "no evaluation yet"];
  const value = meanOf(newest.overall), first = meanOf(s.eval[0].overall), change = value - first;
  if (s.eval.length === 1) return [fixed(value, 3), `mean reward at step ${newest.step}`];
  const sign = change < 0 ? "-" : "+";
  return [fixed(value, 3), `at step ${newest.step}; ${sign}${fixed(Math.abs(change), 3)} since step ${s.eval[0].step}`];
}

function rate(view, role) {
  const now = view.live ? view.time.recent(`tokens:${role}`, 5) : null;
  return now ?? view.status.tokens_per_second[role] ?? null;
}

function lost({ status: s, live }) {
  const gone = s.roles.filter((role) => live && role.silent_s > SILENT_S).map((role) => role.name);
  const dropped = sum(s.dropped);
  const text = `${fixed(dropped)} dropped with a reason (${percent(s.issued ? dropped / s.issued : 0, 1)})`;
  return [text, s.unaccounted !== 0, gone];
}

function figures(view) {
  const s = view.status;
  const [value, since] = evaluation(s);
  const mean = meanStaleness(s.staleness_histogram);
  const learner = busyOf(view, "learner"), generators = busyOf(view, "generator");
  const [dropped, isLost, silent] = lost(view);
  const quick = view.live ? view.steps.last("time/step") : null;
  return [
    { name: "Step", id: "step", value: `${fixed(s.steps)} / ${fixed(s.total_steps)}`,
      more: quick === null ? percent(s.steps / s.total_steps) : `${percent(s.steps / s.total_steps)}; ${duration(quick)} a step` },
    { name: "Evaluation", id: "evaluation", value, more: since },
    { name: "Busy", id: "busy", value: `${percent(learner)} learner`, more: `${percent(generators)} generators`
      + (view.live ? ", last minute" : ", whole run") },
    { name: "Staleness", id: "staleness", value: mean === null ? "-" : `${fixed(mean, 2)} steps`,
      more: `mean per trained token; bound ${s.max_staleness_steps}` },
    { name: "Tokens/s", id: "tokens", value: fixed(rate(view, "generator")), more: `generated; ${fixed(rate(view, "learner"))} trained` },
    { name: "Unaccounted", id: "unaccounted", value: fixed(s.unaccounted), more: dropped, bad: isLost },
    ...(silent.length ? [{ name: "Not heard", id: "silent", value: fixed(silent.length), more: silent.slice(0, 4).join(", "), bad: true }] : []),
  ];
}

function advice(rule) {
  const why = element("details", { class: "why" }, element("summary", { text: "why" }),
    element("span", { text: "Read " }), element("code", { text: `docs/operations.md#${rule.why}` }));
  return element("li", { "data-level": rule.level },
    element("strong", { class: "level", text: rule.level }),
    element("span", { class: "text", text: rule.text }),
    rule.setting ? element("code", { class: "setting", text: rule.setting }) : "", why);
}

export function create() {
  const differs = changes();
  return {
    show(view) {
      const now = figures(view);
      if (differs("verdict", now)) {
        byId("verdict").replaceChildren(...now.map((one) => element("div", { id: `verdict-${one.id}`, class: one.bad ? "bad" : null },
          element("dt", { text: one.name }), element("dd", { class: "value", text: one.value }),
          element("dd", { class: "more", text: one.more }))));
      }
      if (!differs("advisories", view.advisories)) return;
      byId("advisories").replaceChildren(...(view.advisories.length ? view.advisories.map(advice)
        : [element("li", { class: "none", text: "Nothing to change: no rule fires." })]));
    },
  };
}

