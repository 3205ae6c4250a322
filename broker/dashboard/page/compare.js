// The page of several runs: their list, one chart over all that are chosen, and what differs.

import { ask } from "/static/ask.js";
import { byId, element, fillTable, keep, setText } from "/static/dom.js";
import { duration, figure, fixed, plural } from "/static/format.js";
import { Overlay } from "/static/overlay.js";
import { color, onTheme, startTheme } from "/static/theme.js";
import { fragmentOf, viewOf } from "/static/view.js";

const REREAD_MS = 5000;
const SETTLED_MS = 120; // of a slider or a search that is still moving
const MOST_CHOSEN = 16; // the server's bound of one chart
const FIRST_CHOSEN = 8;
const MOST_NAMES = 60;
const FIRST_WANTED = [/^eval\/mean@/, /^reward\/sampled$/, /^reward\/mean$/];
const COLORS = ["--c1", "--c2", "--c3", "--c4", "--c5", "--c6", "--c7", "--c8"];

const page = { runs: [], names: [], differing: [], view: viewOf(location.hash), of: "" };
let chart = null, drawing = 0, settling = null;

const params = (names, more = {}) => {
  const query = new URLSearchParams(more);
  for (const name of names) query.append("run", name);
  return query.toString();
};

const chosen = () => page.view.runs;

/** Return how a run is drawn: by its place in the list, from the oldest on, so that it stays when others begin. */
function lookOf(name) {
  const at = Math.max(0, page.runs.findIndex((run) => run.name === name));
  const place = page.newestFirst ? page.runs.length - 1 - at : at;
  return { color: COLORS[place % COLORS.length], dashed: place % (2 * COLORS.length) >= COLORS.length };
}

function showState(state, text) {
  byId("state").dataset.state = state;
  setText(byId("state"), text);
}

// ---- runs --------------------------------------------------------------------

async function readRuns() {
  const { parent, all_chosen: all, runs, differences } = await ask("/runs.json");
  page.runs = runs;
  page.newestFirst = !all;
  page.between = differences;
  const known = new Set(runs.map((run) => run.name));
  let names = page.view.runs?.filter((name) => known.has(name)) ?? [];
  if (!names.length) names = runs.filter((run) => all || run.steps > 0).slice(0, all ? MOST_CHOSEN : FIRST_CHOSEN).map((run) => run.name);
  page.view.runs = names;
  setText(byId("parent"), parent || plural(runs.length, "run"));
  document.title = `${parent || names.join(", ")} - Slipstream`;
  const running = runs.filter((run) => run.state === "running").length;
  showState(running ? "live" : "ended", running ? `${plural(running, "run")} running` : "no run is running");
  showRuns();
}

function differsText(place) {
  const some = page.between.slice(0, 4).map((one) => `${one.setting} = ${one.values[place] ?? "(none)"}`);
  return [...some, ...(page.between.length > some.length ? [`and ${page.between.length - some.length} more`] : [])].join("; ");
}

function showRuns() {
  setText(byId("runs-note"), page.runs.length ? "" : "No run yet.");
  const full = chosen().length >= MOST_CHOSEN;
  fillTable(byId("list"), ["run", "state", "steps", "newest evaluation", "since the first", "time", "settings that differ"],
    page.runs.map((run, place) => [tick(run, full), state(run),
      run.total_steps ? `${fixed(run.steps)} / ${fixed(run.total_steps)}` : fixed(run.steps),
      evaluation(run), run.eval_first === null ? "-" : `${run.eval_mean >= run.eval_first ? "+" : "−"}${fixed(Math.abs(run.eval_mean - run.eval_first), 3)}`,
      duration(run.elapsed_s), element("span", { class: "text", text: differsText(place) || "-" })]));
  for (const box of byId("list").querySelectorAll("input")) {
    box.checked = chosen().includes(box.value);
    box.disabled = full && !box.checked;
    box.closest("label").querySelector("i").style.backgroundColor = box.checked ? color(lookOf(box.value).color) : "";
  }
  fillSelects();
}

function tick(run) {
  return element("label", { title: run.folder }, element("input", { type: "checkbox", value: run.name }),
    element("i", { "aria-hidden": "true" }), element("span", { text: run.name }));
}

const state = (run) => element("span", { class: "tag", "data-state": run.state, text: run.state, title: run.stop_reason || undefined });

function evaluation(run) {
  if (run.eval_mean === null) return "-";
  const how = run.eval_sampling ? `, ${run.eval_sampling}` : "";
  return `${fixed(run.eval_mean, 3)} at step ${fixed(run.eval_step)} (${plural(run.eval_problems, "problem")}${how})`;
}

function toggle(event) {
  const { value, checked } = event.target;
  page.view.runs = page.runs.map((run) => run.name).filter((name) => (name === value ? checked : chosen().includes(name)));
  changed();
  showRuns();
  readNames().then(draw).catch(failed);
}

// ---- figures -----------------------------------------------------------------

async function readNames() {
  const { names, differences } = await ask(`/names.json?${params(chosen())}`);
  page.names = names;
  page.differing = differences;
  if (!page.view.metric) {
    page.view.metric = FIRST_WANTED.map((one) => names.find((name) => one.test(name))).find(Boolean) ?? names[0] ?? "";
  }
  showNames();
  showSettings();
}

/** Return the names that hold every word, those that begin with the first one before others. */
function matching() {
  const words = byId("wanted").value.toLowerCase().split(/\s+/).filter(Boolean);
  const found = page.names.filter((name) => words.every((word) => name.toLowerCase().includes(word)));
  const first = (name) => (words.length && name.toLowerCase().startsWith(words[0]) ? 0 : 1);
  return found.sort((a, b) => first(a) - first(b) || Number(a.includes("@lag")) - Number(b.includes("@lag")) || (a < b ? -1 : 1));
}

function showNames() {
  const found = matching();
  const shown = found.slice(0, MOST_NAMES);
  setText(byId("matching"), found.length > shown.length ? `${shown.length} of ${plural(found.length, "figure")}: more words find the others` : plural(found.length, "figure"));
  keep(byId("names"), shown, {
    key: (name) => name,
    make: (name) => element("li", {}, element("button", { type: "button", text: name, on: { click: () => pick(name) } })),
    fill: (node, name) => {
      if (name === page.view.metric) node.firstElementChild.setAttribute("aria-current", "true");
      else node.firstElementChild.removeAttribute("aria-current");
    },
  });
}

function pick(name) {
  page.view.metric = name;
  changed();
  showNames();
  draw().catch(failed);
}

// ---- chart -------------------------------------------------------------------

async function draw() {
  const { metric, x, smooth, log } = page.view;
  const turn = drawing += 1;
  const query = { metric, x, smooth: String(smooth) };
  byId("csv").href = `/chart.csv?${params(chosen(), query)}`;
  if (!metric || !chosen().length) {
    chart.show({ metric: metric || "no figure", axis: x, log, x: [], runs: [] });
    setText(byId("chart-note"), chosen().length ? "The chosen runs have no figures yet." : "No run is chosen.");
    return;
  }
  const answer = await ask(`/chart.json?${params(chosen(), query)}`);
  if (turn !== drawing) return; // another one was asked for meanwhile
  const hidden = chart.show({ ...answer, axis: x, log, runs: answer.runs.map((run) => ({ ...run, ...lookOf(run.name) })) });
  const notes = [];
  if (answer.missing.length) notes.push(`Not in ${answer.missing.join(", ")}.`);
  const placeless = answer.runs.filter((run) => run.columns[0].every((value) => value === null)).map((run) => run.name);
  if (placeless.length) notes.push(`${placeless.join(", ")}: ${x === "wall_s" ? "time" : "trained tokens"} not recorded.`);
  if (hidden) notes.push(`${plural(hidden, "value")} of 0 or less cannot be drawn on a logarithmic axis.`);
  setText(byId("chart-note"), notes.join(" "));
}

function png() {
  chart.picture((blob) => {
    const link = element("a", { href: URL.createObjectURL(blob), download: `${page.view.metric.replace(/[^A-Za-z0-9]+/g, "-")}.png` });
    document.body.append(link);
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
    say("saved");
  });
}

async function copyLink() {
  try {
    await navigator.clipboard.writeText(location.href);
    say("copied; it opens this page while it is served");
  } catch {
    say("the address of this page is the link");
  }
}

function say(text) {
  setText(byId("done"), text);
  setTimeout(() => { if (byId("done").textContent === text) setText(byId("done"), ""); }, 4000);
}

// ---- what differs ------------------------------------------------------------

function showSettings() {
  const rows = page.differing.map((one) => [one.setting, ...one.values.map((value) => element("span", { class: "text", text: value ?? "(none)" }))]);
  const few = chosen().length < 2;
  setText(byId("settings-note"), few ? "Choose two runs or more." : rows.length ? "" : "The chosen runs have the same settings.");
  fillTable(byId("differing"), rows.length && !few ? ["setting", ...chosen()] : [], few ? [] : rows);
}

function fillSelects() {
  const names = page.runs.map((run) => run.name);
  const [one, other] = [...chosen(), ...names.filter((name) => !chosen().includes(name))];
  const [first, second] = page.newestFirst && other ? [other, one] : [one, other]; // B is the newer one
  for (const [id, key, begin] of [["run-a", "a", first], ["run-b", "b", second ?? first]]) {
    const select = byId(id);
    if (!names.includes(page.view[key])) page.view[key] = begin ?? "";
    if ([...select.options].map((one) => one.value).join("\n") !== names.join("\n")) {
      select.replaceChildren(...names.map((name) => element("option", { value: name, text: name })));
    }
    select.value = page.view[key];
  }
}

async function showDifference() {
  const { a, b } = page.view, line = byId("verdict-line"), bar = byId("interval");
  const tell = (kind, text, note = "") => {
    line.dataset.kind = kind;
    setText(line, text);
    setText(byId("verdict-note"), note);
    bar.hidden = kind === "none";
  };
  if (!a || !b || a === b) return tell("none", "Choose two different runs.");
  const found = await ask(`/difference.json?${new URLSearchParams({ a, b })}`);
  if (a !== page.view.a || b !== page.view.b) return undefined;
  if (found.reason) return tell("none", `Not known: ${found.reason}.`);
  const { difference, low, high, paired } = found.interval;
  const sign = (value) => `${value < 0 ? "−" : "+"}${fixed(Math.abs(value), 3)}`;
  const kind = low > 0 ? "better" : high < 0 ? "worse" : "even";
  const means = { better: `${b} is better than ${a}`, worse: `${b} is worse than ${a}`, even: `no difference is shown: the interval holds 0` }[kind];
  const sets = paired ? `the same ${plural(found.num_problems[0], "problem")}, resampled in pairs` : `${fixed(found.num_problems[0])} and ${fixed(found.num_problems[1])} problems that are not the same, resampled apart`;
  tell(kind, `B less A: ${sign(difference)}, from ${sign(low)} to ${sign(high)}; ${means}`,
    `Mean reward of the evaluations at step ${fixed(found.steps[0])} (A) and ${fixed(found.steps[1])} (B): ${sets}. The interval holds ${fixed(100 * found.level)}% of ${fixed(found.resamples)} resampled differences, seed 0. It covers the choice of problems, not another seed of the training.`);
  const reach = 1.15 * Math.max(Math.abs(low), Math.abs(high), 1e-9);
  const at = (value) => `${50 + 50 * value / reach}%`;
  const [zero, span, mean] = bar.children;
  zero.style.left = at(0);
  span.style.left = at(low);
  span.style.width = `${50 * (high - low) / reach}%`;
  mean.style.left = at(difference);
  return undefined;
}

// ---- the view in the address ---------------------------------------------------

function changed() {
  history.replaceState(null, "", fragmentOf(page.view));
}

function showView() {
  const { x, smooth, log } = page.view;
  for (const one of document.querySelectorAll("#axis input")) one.checked = one.value === x;
  byId("smooth").value = String(smooth);
  setText(byId("smooth-value"), fixed(smooth, 2));
  byId("log").checked = log;
}

function soon(act) {
  clearTimeout(settling);
  settling = setTimeout(act, SETTLED_MS);
}

function failed(error) {
  showState("failed", error.message);
}

async function load() {
  await readRuns();
  await readNames();
  showView();
  await draw();
  document.body.dataset.drawn = String(Math.round(performance.now()));
  changed();
  await showDifference();
}

async function again() {
  if (!document.hidden && (page.runs.some((run) => run.state === "running") || byId("state").dataset.state === "failed")) {
    try {
      await readRuns();
      await readNames();
      await draw();
    } catch (error) {
      failed(error);
    }
  }
  setTimeout(again, REREAD_MS);
}

startTheme(byId("theme"));
chart = new Overlay(byId("chart"));
onTheme(() => { if (page.runs.length) showRuns(); });
byId("list").addEventListener("change", toggle);
byId("pick").addEventListener("submit", (event) => {
  event.preventDefault();
  const [first] = matching();
  if (first) pick(first);
});
byId("wanted").addEventListener("input", () => soon(showNames));
byId("axis").addEventListener("change", (event) => { page.view.x = event.target.value; changed(); draw().catch(failed); });
byId("smooth").addEventListener("input", (event) => {
  page.view.smooth = Number(event.target.value);
  setText(byId("smooth-value"), fixed(page.view.smooth, 2));
  soon(() => { changed(); draw().catch(failed); });
});
byId("log").addEventListener("change", (event) => { page.view.log = event.target.checked; changed(); draw().catch(failed); });
byId("png").addEventListener("click", png);
byId("link").addEventListener("click", copyLink);
for (const [id, key] of [["run-a", "a"], ["run-b", "b"]]) {
  byId(id).addEventListener("change", (event) => { page.view[key] = event.target.value; changed(); showDifference().catch(failed); });
}
// The address holds the view, so a link to a panel scrolls by itself.
for (const link of document.querySelectorAll("[data-panel], .skip")) {
  link.addEventListener("click", (event) => {
    event.preventDefault();
    const panel = byId(link.getAttribute("href").slice(1));
    panel.scrollIntoView();
    panel.setAttribute("tabindex", "-1");
    panel.focus({ preventScroll: true });
  });
}
window.addEventListener("hashchange", () => {
  page.view = { ...page.view, ...viewOf(location.hash) };
  load().catch(failed);
});
load().catch(failed);
setTimeout(again, REREAD_MS);
