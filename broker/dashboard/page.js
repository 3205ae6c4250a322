// The page: the state of /state.json, kept live by /events, shown by one module per panel.

import { byId, changes, say } from "/static/dom.js";
import { duration } from "/static/format.js";
import { Columns } from "/static/history.js";
import { Stream } from "/static/stream.js";
import { startTheme } from "/static/theme.js";
import * as accounting from "/static/accounting.js";
import * as correction from "/static/correction.js";
import * as headline from "/static/headline.js";
import * as learning from "/static/learning.js";
import * as pools from "/static/pools.js";
import * as staleness from "/static/staleness.js";
import * as trajectory from "/static/trajectory.js";
import * as weights from "/static/weights.js";

const DRAW_EVERY_MS = 1000;
const view = { status: null, advisories: [], time: null, steps: null, live: true };
const fresh = new Set(); // what came since the last drawing: status, time, steps
const differs = changes();
let drawnAt = -Infinity, timer = null, panels = [];

function take(state) {
  view.status = state.status;
  view.advisories = state.advisories ?? [];
  fresh.add("status");
}

function takePast(history) {
  view.time = new Columns("at_s", history?.time);
  view.steps = new Columns("step", history?.steps);
  fresh.add("time").add("steps");
}

function hear(event) {
  take(event);
  const { at_s: at, ...values } = event.point ?? {};
  if (Number.isFinite(at) && at !== view.time.x.at(-1)) {
    view.time.add(at, values);
    fresh.add("time");
  }
  for (const { step, at_s: _, ...figures } of event.steps ?? []) {
    view.steps.add(step, figures);
    fresh.add("steps");
  }
  soon();
}

// At most one drawing a second, and none while nobody sees it.
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
  if (differs("eval", view.status.eval)) news.add("steps");
  for (const panel of panels) panel.show(view, news);
  about();
}

function about() {
  const s = view.status;
  document.title = `${s.run_name} ${s.steps}/${s.total_steps} - Slipstream`;
  say(byId("run"), s.run_name);
  const ends = s.stop_reason ? `; ends early: ${s.stop_reason}` : "";
  say(byId("about"), `${s.outcome} ${view.live ? "for" : "after"} ${duration(s.elapsed_s)}${ends}`);
}

// The text stays the same while a break lasts, so that it is spoken once.
function tell(state, since) {
  const text = {
    live: "live",
    ended: "finished run, from its files",
    broken: `no connection to the broker; figures are of ${since?.toLocaleTimeString("en-GB")}, trying again`,
    failed: "the broker does not answer; trying again",
  }[state];
  byId("state").dataset.state = state;
  say(byId("state"), text);
}

async function load() {
  const answer = await fetch("/state.json", { cache: "no-store" });
  if (!answer.ok) throw new Error(`state.json: ${answer.status}`);
  const state = await answer.json();
  view.live = state.live !== false;
  take(state);
  takePast(state.history);
  soon();
}

// After a break the points that were missed are read anew.
const reload = () => load().catch(() => {});

async function start() {
  try {
    await load();
  } catch {
    tell("failed");
    setTimeout(start, 2000);
    return;
  }
  if (!view.live) {
    tell("ended");
    return;
  }
  tell("live");
  const stream = new Stream("/events", { hear, tell, back: reload });
  window.addEventListener("pagehide", () => stream.close());
}

startTheme(byId("theme"));
panels = [headline, learning, pools, staleness, weights, correction, accounting].map((panel) => panel.create());
trajectory.create();
document.addEventListener("visibilitychange", soon);
start();
