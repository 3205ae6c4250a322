// The run at a glance: six figures that answer the questions, and what to change.

import { silence, SILENT_S } from "/static/accounting.js";
import { ask } from "/static/ask.js";
import { byId, changes, element, keep, setText } from "/static/dom.js";
import { duration, fixed, meanReward, percent, sum } from "/static/format.js";
import { meanOf } from "/static/history.js";

const BUSY_S = 60;
const RATE_S = 10;
const STEPS = 10; // that a reward is averaged over: single batches are noisy
const MOST_NAMES = 4;

/** Return the mean staleness of the trained tokens in learner steps, or null. */
export function meanStaleness(histogram) {
  const total = sum(histogram);
  if (!total) return null;
  return Object.entries(histogram).reduce((all, [lag, tokens]) => all + Number(lag) * tokens, 0) / total;
}

const change = (value) => `${value < 0 ? "-" : "+"}${fixed(Math.abs(value), 3)}`;

// Does it learn: held-out problems show it best, the reward of sampled answers where there are none.
function learns(view) {
  const rounds = view.status.eval, newest = rounds.at(-1);
  if (!newest) return sampled(view.steps);
  const value = meanReward(newest.overall), name = "Evaluation", id = "evaluation";
  const how = view.sampling ? `, ${view.sampling}` : "";
  if (rounds.length === 1) return { name, id, value: fixed(value, 3), more: `mean reward at step ${newest.step}${how}` };
  const since = `${change(value - meanReward(rounds[0].overall))} since step ${rounds[0].step}`;
  return { name, id, value: fixed(value, 3), more: `at step ${newest.step}${how}; ${since}` };
}

function sampled(steps) {
  const key = ["reward/sampled", "reward/mean"].find((name) => meanOf(steps.get(name) ?? []) !== null);
  if (!key) return { name: "Reward", id: "reward", value: "-", more: "no step is trained yet" };
  const values = steps.get(key), { from } = steps.window(STEPS);
  const what = key === "reward/sampled" ? "sampled answers" : "trained answers";
  const now = meanOf(values.slice(from));
  const until = steps.x.findLastIndex((step) => step < steps.x[0] + STEPS) + 1;
  const since = until <= from ? `; ${change(now - meanOf(values.slice(0, until)))} since ${spell(steps.x, 0, until)}` : "";
  return { name: "Reward", id: "reward", value: fixed(now, 3), more: `${what}, ${spell(steps.x, from, steps.length)}${since}` };
}

const spell = (x, from, until) => (until - from > 1 ? `steps ${x[from]} to ${x[until - 1]}` : `step ${x[from]}`);

/** Return how busy a role was lately (over the run if it is over): {share, unknown}, its mean and the number of silent processes. */
function busyOf(view, role, rows) {
  if (!view.live) return { share: view.status.busy[role] ?? null, unknown: 0 };
  const shares = view.status.roles.filter((one) => one.role === role).map((one) => view.time.recent(`busy:${one.name}`, rows));
  return { share: meanOf(shares), unknown: shares.filter((share) => share === null).length, all: shares.length };
}

function busy(view) {
  const rows = view.time.window(BUSY_S);
  const learner = busyOf(view, "learner", rows), generators = busyOf(view, "generator", rows);
  const over = !view.live ? "whole run" : Math.abs(rows.lasted - BUSY_S) < 3 ? "last minute" : `last ${spanOf(rows)}`;
  const few = generators.unknown && generators.share !== null ? ` (${generators.unknown} of ${generators.all} unknown)` : "";
  const isKnown = learner.share !== null || generators.share !== null;
  return { name: "Busy", id: "busy", value: learner.share === null ? "-" : `${percent(learner.share)} learner`,
    more: isKnown ? `${percent(generators.share)} generators${few}, ${over}` : "no process reports" };
}

const spanOf = ({ lasted }) => (lasted < 120 ? `${fixed(lasted)} s` : duration(lasted));

function rates(view) {
  const rows = view.time.window(RATE_S);
  const of = (role) => (view.live ? view.time.recent(`tokens:${role}`, rows) : view.status.tokens_per_second[role] ?? null);
  const [generated, trained] = [of("generator"), of("learner")];
  const over = !view.live ? "whole run" : `last ${spanOf(rows)}`;
  return { name: "Tokens/s", id: "tokens", value: fixed(generated),
    more: generated === null && trained === null ? "nothing is generated" : `generated; ${fixed(trained)} trained; ${over}` };
}

function lost({ status: s }) {
  const dropped = sum(s.dropped);
  return { name: "Unaccounted", id: "unaccounted", value: fixed(s.unaccounted), bad: s.unaccounted !== 0,
    more: dropped ? `${fixed(dropped)} dropped with a reason (${percent(dropped / s.issued, 1)})` : "nothing is dropped" };
}

function silent(view) {
  const names = view.status.roles.filter((role) => view.live && silence(view, role) >= SILENT_S).map((role) => role.name);
  if (!names.length) return [];
  const rest = names.length > MOST_NAMES ? ` and ${names.length - MOST_NAMES} more` : "";
  return [{ name: "Not heard", id: "silent", value: fixed(names.length), more: names.slice(0, MOST_NAMES).join(", ") + rest, bad: true }];
}

/** Return the bound, and the one in force where a target has lowered it. */
function boundOf(s) {
  const bound = `bound ${s.max_staleness_steps}`;
  return s.throttle && s.throttle.bound < s.max_staleness_steps ? `${bound}, ${s.throttle.bound} in force` : bound;
}

/** Return how long the rest takes at the pace of the newest step. */
function left(s, seconds) {
  const steps = s.total_steps - s.steps;
  return steps > 0 ? `, about ${duration(steps * seconds)} left` : "";
}

function figures(view) {
  const s = view.status, mean = meanStaleness(s.staleness_histogram);
  const done = s.total_steps ? percent(s.steps / s.total_steps) : "-";
  const quick = view.live ? view.steps.last("time/step") : null;
  return [
    { name: "Step", id: "step", value: `${fixed(s.steps)} / ${fixed(s.total_steps)}`, more: quick === null ? done : `${done}; ${duration(quick)} a step${left(s, quick)}` },
    learns(view),
    busy(view),
    { name: "Staleness", id: "staleness", value: mean === null ? "-" : `${fixed(mean, 2)} steps`,
      more: `${mean === null ? "no token is trained yet" : "mean per trained token"}; ${boundOf(s)}` },
    rates(view),
    lost(view),
    ...silent(view),
  ];
}

const cell = (one) => element("div", { id: `verdict-${one.id}` },
  element("dt", { text: one.name }), element("dd", { class: "value" }), element("dd", { class: "more" }));

function fillCell(node, one) {
  node.className = one.bad ? "bad" : "";
  setText(node.querySelector(".value"), one.value);
  setText(node.querySelector(".more"), one.more);
}

let guide = null; // sections by anchor; fetched on the first "why"

async function explain(box, anchor) {
  guide ??= ask("/why.json");
  let section;
  try {
    section = (await guide)[anchor];
  } catch (error) {
    guide = null;
    box.replaceChildren(element("p", { text: `not read: ${error.message}` }));
    return;
  }
  box.replaceChildren(...(section
    ? [element("h4", { text: section.title }), element("p", { class: "guide", text: section.text })]
    : [element("p", {}, "Read ", element("code", { text: `docs/operations.md#${anchor}` }))]));
}

function advice(rule) {
  const box = element("div", { class: "section" });
  const why = element("details", { class: "why" }, element("summary", { text: "why" }), box);
  why.addEventListener("toggle", () => { if (why.open && !box.children.length) explain(box, rule.why); });
  return element("li", {}, element("strong", { class: "level" }), element("span", { class: "text" }), element("code", { class: "setting" }), why);
}

function fillAdvice(node, rule) {
  node.dataset.level = rule.level;
  setText(node.querySelector(".level"), rule.level);
  setText(node.querySelector(".text"), rule.text);
  node.querySelector(".setting").hidden = !rule.setting;
  setText(node.querySelector(".setting"), rule.setting);
}

const QUIET = "Nothing to change: no rule fires.";
const EARLY = "Too early to say: the rules look at minutes and at learner steps that have not passed yet.";

function showAdvice({ advisories, ready }) {
  const host = byId("advisories"), none = host.querySelector(":scope > .none");
  if (advisories.length) {
    none?.remove();
    keep(host, advisories, { key: (rule) => rule.rule, make: advice, fill: fillAdvice });
  } else if (none) setText(none, ready ? QUIET : EARLY);
  else host.replaceChildren(element("li", { class: "none", text: ready ? QUIET : EARLY }));
}

export function create() {
  const differs = changes();
  return {
    show(view) {
      const now = figures(view);
      if (differs("verdict", now)) keep(byId("verdict"), now, { key: (one) => one.id, make: cell, fill: fillCell });
      if (differs("advisories", [view.advisories, view.ready])) showAdvice(view);
    },
  };
}
