// The page: the state of /state.json, kept live by /events, shown by one module per panel.

import { ask, MOVED, REFUSED } from "/static/ask.js";
import { byId, changes, setText } from "/static/dom.js";
import { duration, label } from "/static/format.js";
import { Columns } from "/static/history.js";
import { Stream } from "/static/stream.js";
import { startTheme } from "/static/theme.js";
import * as accounting from "/static/accounting.js";
import * as correction from "/static/correction.js";
import * as expected from "/static/expected.js";
import * as headline from "/static/headline.js";
import * as learning from "/static/learning.js";
import * as logs from "/static/logs.js";
import * as pools from "/static/pools.js";
import * as staleness from "/static/staleness.js";
import * as trajectory from "/static/trajectory.js";
import * as trust from "/static/trust.js";
import * as weights from "/static/weights.js";

const DRAW_EVERY_MS = 1000;
const RETRY_MS = 2000;
const MOST_PUBLISHES = 60;
const MOST_ROUNDS = 500;
const view = { status: null, toldAt: 0, advisories: [], ready: true, time: null, steps: null, live: true, sampling: "" };
const fresh = new Set(); // what came since the last drawing: status, time, steps
const differs = changes();
let drawnAt = -Infinity, timer = null, panels = [], received = 0, stream = null, late = null;

/** Return both lists as one: of the same key the later counts. */
function merged(old, later, key, most) {
  return [...new Map([...old, ...later].map((one) => [key(one), one])).values()].slice(-most);
}

// An event holds only the newest publishes and evaluations: the page keeps the others.
function joined(before, status) {
  const rounds = merged(before.eval, status.eval, (one) => one.step, MOST_ROUNDS);
  return { ...status,
    eval: rounds.filter((one) => one.step <= status.steps).sort((a, b) => a.step - b.step),
    publish_history: merged(before.publish_history, status.publish_history, (one) => label(one.version), MOST_PUBLISHES) };
}

function take(event) {
  const { status } = event;
  view.status = joined(view.status ?? status, status);
  view.toldAt = performance.now();
  view.advisories = event.advisories ?? [];
  view.ready = event.advice_ready !== false;
  view.live = event.live !== false && !isOver(status);
  fresh.add("status");
}

const isOver = (status) => status.finished || status.outcome !== "running";

function receive(event) {
  received += 1;
  take(event);
  const { at_s: at, ...values } = event.point ?? {};
  if (Number.isFinite(at) && at !== view.time.x.at(-1)) {
    view.time.add(at, values);
    fresh.add("time");
  }
  if (view.steps.x.at(-1) > event.status.steps) {
    view.steps.forgetAfter(event.status.steps); // a learner went back
    fresh.add("steps");
  }
  for (const { step, at_s: _, ...figures } of event.steps ?? []) {
    if (step <= (view.steps.x.at(-1) ?? -Infinity)) continue;
    view.steps.add(step, figures);
    fresh.add("steps");
  }
  if (isOver(event.status)) end();
  soon();
  clearTimeout(late);
  const next = accounting.nextSilent(view);
  if (next < Infinity) late = setTimeout(drawSilence, next * 1000);
}

// A process that is late may pass the limit before the next event, and is not to wait for it.
function drawSilence() {
  fresh.add("status");
  requestAnimationFrame(draw);
}

// Nothing more will come.
function end() {
  stream?.close();
  showState("over");
}

// At most one drawing a second, and none while the page is hidden.
function soon() {
  if (timer !== null || document.hidden) return;
  const wait = Math.max(0, DRAW_EVERY_MS - (performance.now() - drawnAt));
  timer = setTimeout(() => { timer = null; requestAnimationFrame(draw); }, wait);
}

function draw() {
  if (document.hidden || !fresh.size) return;
  drawnAt = performance.now();
  const news = new Set(fresh);
  fresh.clear();
  const { eval: rounds } = view.status;
  if (differs("eval", [rounds.length, rounds.at(-1)])) news.add("steps");
  for (const panel of panels) panel.show(view, news);
  about();
}

function about() {
  const s = view.status;
  document.title = `${s.run_name} ${s.steps}/${s.total_steps} - Slipstream`;
  setText(byId("run"), s.run_name);
  const ends = s.stop_reason ? `; ends early: ${s.stop_reason}` : "";
  setText(byId("about"), `${outcome()} ${view.live ? "for" : "after"} ${duration(s.elapsed_s)}${ends}`);
}

const outcome = () => (view.status.finished && view.status.outcome === "running" ? "finished" : view.status.outcome);

// The text stays the same while a break lasts, so that it is spoken once.
function showState(state, since) {
  const text = {
    live: "live",
    ended: view.status && isOver(view.status) ? "finished run, from its files" : "from the run's files; its broker does not answer",
    over: `the run is over: ${view.status && outcome()}; \`slipstream dashboard RUN\` shows it later`,
    broken: `no connection to the broker; figures are of ${since?.toLocaleTimeString("en-GB")}, trying again`,
    failed: "the broker does not answer; trying again",
    refused: MOVED,
  }[state];
  byId("state").dataset.state = state;
  setText(byId("state"), text);
}

// Events received while the state was on its way are later than it, and stay.
async function load() {
  const before = received;
  const state = await ask("/state.json");
  const past = { time: new Columns("at_s", state.history?.time), steps: new Columns("step", state.history?.steps) };
  if (received === before) {
    view.status = null;
    take(state);
  } else {
    past.time.goOn(view.time);
    past.steps.forgetAfter(view.status.steps);
    past.steps.goOn(view.steps);
    view.status = joined(state.status, view.status);
  }
  Object.assign(view, past);
  fresh.add("time").add("steps");
  soon();
  return state;
}

// How an evaluation chose its answers is a setting of the run.
async function readSettings() {
  try {
    view.sampling = (await ask("/about.json")).eval_sampling;
  } catch {
    return; // the label stays without it
  }
  if (view.status) fresh.add("status").add("steps");
  if (view.status) soon();
}

async function start() {
  let state;
  try {
    state = await load();
  } catch (error) {
    showState(error.status === REFUSED ? "refused" : "failed");
    setTimeout(start, RETRY_MS);
    return;
  }
  if (state.live === false) {
    showState("ended");
    return;
  }
  if (isOver(state.status)) {
    end();
    return;
  }
  showState("live");
  const address = () => `/events?after=${view.steps.x.at(-1) ?? 0}`;
  // After a break the missed points are read again.
  stream = new Stream(address, { receive, showState, back: () => load().catch(() => {}) });
  window.addEventListener("pagehide", () => stream.close());
}

startTheme(byId("theme"));
panels = [headline, learning, pools, staleness, weights, trust, correction, accounting].map((panel) => panel.create());
trajectory.create();
logs.create(() => view.live);
expected.create();
document.addEventListener("visibilitychange", soon);
readSettings();
start();
