"use strict";
// One state of the run per server-sent event. Text goes in through textContent only.
const SVG = "http://www.w3.org/2000/svg";
const byId = (id) => document.getElementById(id);
const number = (value, digits = 0) =>
  Number(value).toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: digits });
const percent = (value) => `${number(100 * value, 1)} %`;

function element(tag, text, className) {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (className) node.className = className;
  return node;
}

function table(id, head, rows) {
  const line = (cells, tag) => {
    const row = element("tr");
    row.append(...cells.map((cell) => element(tag, cell)));
    return row;
  };
  byId(id).replaceChildren(line(head, "th"), ...rows.map((cells) => line(cells, "td")));
}

function learning(s) {
  const last = s.steps_history.at(-1);
  const figures = [["step", `${s.steps} / ${s.total_steps}`]];
  if (s.eval.length) figures.push(["evaluation", number(meanOf(s.eval.at(-1).overall), 3)]);
  if (last) {
    const sampled = s.steps_history.findLast((p) => "reward/sampled" in p.metrics);
    figures.push(["reward, sampled", sampled ? number(sampled.metrics["reward/sampled"], 3) : "-"]);
    figures.push(["entropy", number(last.metrics["policy/entropy"] ?? 0, 3)]);
    figures.push(["step takes", `${number(last.metrics["time/step"] ?? 0, 2)} s`]);
  }
  byId("learning").replaceChildren(...figures.map(([name, value]) => {
    const pair = element("div");
    pair.append(element("dt", name), element("dd", value));
    return pair;
  }));
}

function shape(tag, attributes, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

function curve(s) {
  const width = byId("curve").clientWidth || 400, height = 180, left = 34, bottom = 22, top = 8;
  const x = (step) => left + (width - left - 8) * step / s.total_steps;
  const y = (value) => top + (height - top - bottom) * (1 - Math.min(1, Math.max(0, value)));
  const path = (points) => points.map(([a, b], i) => `${i ? "L" : "M"}${x(a)},${y(b)}`).join("");
  const nodes = [];
  for (const tick of [0, 0.25, 0.5, 0.75, 1]) {
    nodes.push(shape("line", { class: "axis", x1: left, x2: width - 8, y1: y(tick), y2: y(tick) }));
    nodes.push(shape("text", { x: left - 6, y: y(tick) + 4, "text-anchor": "end" }, tick));
  }
  for (const step of [0, Math.round(s.total_steps / 2), s.total_steps]) {
    const anchor = step === s.total_steps ? "end" : "middle";
    nodes.push(shape("text", { x: x(step), y: height - 5, "text-anchor": anchor }, step));
  }
  const rewards = s.steps_history.filter((p) => "reward/sampled" in p.metrics)
    .map((p) => [p.step, p.metrics["reward/sampled"]]);
  nodes.push(shape("path", { class: "reward", d: path(rewards) }));
  nodes.push(shape("path", { class: "eval", d: path(s.eval.map((p) => [p.step, meanOf(p.overall)])) }));
  for (const p of s.eval) {
    const dot = shape("circle", { class: "dot", cx: x(p.step), cy: y(meanOf(p.overall)), r: 4 });
    const mean = number(meanOf(p.overall), 3);
    dot.append(shape("title", {}, `step ${p.step}: mean reward ${mean} of ${p.overall.num_answers} answers`));
    nodes.push(dot);
  }
  byId("curve").setAttribute("viewBox", `0 0 ${width} ${height}`);
  byId("curve").replaceChildren(...nodes);
}

function meanOf(figures) {
  const name = Object.keys(figures.metrics).find((key) => key.startsWith("mean@"));
  return name ? figures.metrics[name] : 0;
}

function evaluations(s) {
  const newest = s.eval.at(-1);
  byId("evaluation").hidden = !newest;
  if (!newest) return;
  const names = Object.keys(newest.overall.metrics);
  const row = (title, one) => [title, one.num_answers, one.num_dropped,
    ...names.map((name) => (name in one.metrics ? number(one.metrics[name], 3) : "-"))];
  const sources = Object.entries(newest.by_source);
  table("sources", ["data source", "answers", "dropped", ...names.map((n) => n.replaceAll("_", " "))],
    [...sources.map(([name, one]) => row(name, one)),
      ...(sources.length > 1 ? [row("all", newest.overall)] : [])]);
  byId("evaluated").textContent = `answers begun at step ${newest.step}`;
}

function accounting(s) {
  const sum = (counts) => Object.values(counts).reduce((a, b) => a + b, 0);
  const dropped = sum(s.dropped), flying = sum(s.in_flight);
  byId("equation").textContent = `issued ${s.issued} = trained ${s.trained} + dropped ${dropped}`
    + ` + in flight ${flying}` + (s.unaccounted ? `; UNACCOUNTED ${s.unaccounted}` : "");
  byId("equation").className = s.unaccounted ? "bad" : "";
  const rows = [...Object.entries(s.in_flight).map(([k, v]) => [`in flight: ${k}`, number(v)]),
    ...Object.entries(s.dropped).map(([k, v]) => [`dropped: ${k}`, number(v)])];
  table("states", ["groups", "count"], rows);
}

function staleness(s) {
  const total = Object.values(s.staleness_histogram).reduce((a, b) => a + b, 0) || 1;
  const rows = [];
  for (let lag = 0; lag <= s.max_staleness_steps; lag += 1) {
    const tokens = s.staleness_histogram[lag] ?? 0;
    const row = element("div", undefined, "row"), bar = element("meter");
    bar.value = tokens / total;
    bar.setAttribute("aria-label", `${lag} steps`);
    row.append(element("span", `${lag} ${lag === 1 ? "step" : "steps"}`), bar,
      element("span", `${percent(tokens / total)}`));
    rows.push(row);
  }
  byId("staleness").replaceChildren(...rows);
}

function roles(s) {
  table("roles", ["process", "busy", "tokens/s", "weights", "leases", "last heard", "time by phase"],
    s.roles.map((r) => [r.name, percent(r.busy), number(r.tokens_per_second),
      r.adopted ? `v${r.adopted[0]}.${r.adopted[1]}` : "", r.leases, `${number(r.silent_s, 1)} s`,
      Object.entries(r.phase_seconds).map(([k, v]) => `${k} ${number(v, 1)} s`).join(", ")]));
}

function publishes(s) {
  const rows = s.publish_history.slice(-8).reverse().map((p) => {
    const adopted = Object.entries(p.adopted_by).map(([k, v]) => `${k} ${number(v, 2)} s`).join(", ");
    const failed = Object.entries(p.failed).map(([k, v]) => `${k} left out: ${v}`).join("; ");
    const flying = Object.values(p.num_in_flight).reduce((a, b) => a + b, 0);
    return [`v${p.version[0]}.${p.version[1]}`, flying, [adopted, failed].filter(Boolean).join("; ")];
  });
  table("publishes", ["version", "in flight", "adopted by"], rows);
}

function show(s) {
  byId("run").textContent = s.run_name;
  byId("state").textContent = `${s.outcome}, ${number(s.elapsed_s)} s, ${s.publishes} publishes, `
    + `${s.publishes_while_generating} of them while generating`
    + (s.stop_reason ? `; ends early, ${s.stop_reason}` : "");
  learning(s); curve(s); evaluations(s); accounting(s); staleness(s); roles(s); publishes(s);
  table("queues", ["queue", "items"], Object.entries(s.queue).map(([k, v]) => [k.replaceAll("_", " "), v]));
  byId("waiting").textContent = s.waiting_for ? `The learner waits for ${s.waiting_for}.` : "";
}

fetch("/status.json").then((answer) => answer.json()).then(show);
const source = new EventSource("/events");
source.onmessage = (event) => show(JSON.parse(event.data));
source.onerror = () => { byId("state").textContent = "the broker does not answer"; };
