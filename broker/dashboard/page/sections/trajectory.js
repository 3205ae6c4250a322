// One trajectory: search, list, and the answer token by token.

import { ask } from "/static/ask.js";
import { byId, element, fillTable, setText } from "/static/dom.js";
import { figure, fixed, plural } from "/static/format.js";
import { between, onTheme } from "/static/theme.js";

const KINDS = 8; // colors for version runs
const SHORT = 400; // characters of context that are shown unfolded
const STRONG = 1; // nats at which a difference has the full color
let shown = null, requested = 0, wanted = 0; // the newest requested list and trajectory

// Groups not answered or scored; a click shows their life.
async function letters() {
  if (!byId("letters").open) return;
  try {
    const { letters: found } = await ask("/dead_letters");
    byId("letters-list").replaceChildren(...(found.length ? found.map((one) => element("li", {},
      element("button", { type: "button", on: { click: () => open(one.group_id, 0, one) } },
        element("span", { class: "prompt", text: one.prompt }),
        element("span", { class: "more", text: `g${one.group_id}, ${one.reason} at step ${one.step}; ${one.failures.at(-1) ?? "no attempt is kept"}` }))))
      : [element("li", { class: "empty", text: "There are none." })]));
  } catch (error) {
    byId("letters-list").replaceChildren(element("li", { class: "empty", text: error.message }));
  }
}

/** List what fits a query and return how much does; null if that is not known, or no longer wanted. */
async function list(query, what, none = "") {
  const mine = ++requested;
  setText(byId("found"), "searching");
  try {
    const { items, more, groups } = await ask(`/items?${query}`);
    if (mine !== requested) return [];
    const count = `${plural(items.length, "trajectory", "trajectories")}${what}${more ? ", the newest of more" : ""}`;
    setText(byId("found"), (!items.length && none) || count);
    byId("items").replaceChildren(...items.map(row));
    mark();
    return items.length ? [] : groups ?? [];
  } catch (error) {
    if (mine === requested) setText(byId("found"), `nothing found: ${error.message}`);
    return [];
  }
}

// Of a group without a recorded answer the ledger may still have the prompt and the life.
async function search(text) {
  const unrecorded = await list(`q=${encodeURIComponent(text)}`, text ? ` with "${text}"` : "");
  if (unrecorded.length) await open(unrecorded.at(-1), 0);
}

function row(item) {
  const button = element("button", { type: "button", "data-key": `${item.group_id}.${item.sibling}`, on: { click: () => open(item.group_id, item.sibling) } },
    element("span", { class: "prompt", text: item.prompt }),
    element("span", { class: "more", text: `g${item.group_id}/${item.sibling}, step ${item.step}, lag up to ${item.lag}, `
      + `${item.num_turns > 1 ? `${plural(item.num_turns, "turn")}, ` : ""}${item.num_branches > 1 ? `${plural(item.num_branches, "branch", "branches")}, ` : ""}`
      + `${plural(item.num_tokens, "token")}, reward ${figure(item.reward)}` }));
  return element("li", {}, button);
}

/** List the recorded trajectories that have tokens of a staleness, and go there. */
export function showLag(lag) {
  byId("query").value = "";
  byId("trajectory").scrollIntoView();
  byId("query").focus({ preventScroll: true });
  return list(`lag=${lag}`, ` with tokens of staleness ${lag}`);
}

// letter: the known facts of a dead letter, in case the broker has fewer.
async function open(group, sibling, letter = null) {
  const mine = ++wanted;
  try {
    const one = await ask(`/trajectory?group=${group}&sibling=${sibling}`);
    if (mine !== wanted) return;
    if (!one.found && !one.life.length && !one.prompt && !letter) {
      setText(byId("found"), `g${group}/${sibling} is not recorded`);
      return;
    }
    shown = { ...one, prompt: one.prompt || letter?.prompt || "", failures: one.failures?.length ? one.failures : letter?.failures ?? [] };
    history.replaceState(null, "", `#g${group}/${sibling}`);
    fill();
    byId("one").hidden = false;
    byId("one").focus({ preventScroll: true });
    byId("one").scrollIntoView({ block: "nearest" });
  } catch (error) {
    if (mine === wanted) setText(byId("found"), `not read: ${error.message}`);
  }
}

/** Return the spans of tokens that one version chose: {version, lag, first, count}. */
export function runsOf(tokens) {
  const runs = [];
  tokens.forEach((token, first) => {
    const last = runs.at(-1);
    if (last && last.version === token.version) last.count += 1;
    else runs.push({ version: token.version, lag: token.lag, first, count: 1 });
  });
  return runs;
}

const cut = (count, what) => (count > 0 ? [element("span", { class: "cut", text: ` [${plural(count, what)} left out] ` })] : []);
const excerpt = ({ head, num_cut: count = 0, tail = "" }) => [document.createTextNode(head), ...cut(count, "character"), document.createTextNode(tail)];

// Context is folded where it is long; what a branch shares with an earlier one always is.
function folded(title, text, isOpen) {
  const size = text.head.length + (text.num_cut ?? 0) + (text.tail ?? "").length;
  return element("details", { class: "context", open: isOpen && size <= SHORT },
    element("summary", { text: `${title}, ${plural(size, "character")}` }), element("div", { class: "text" }, ...excerpt(text)));
}

// What precedes a turn: where a branch begins, the part of its prompt that is known already, and the rest.
function context(one) {
  const shared = one.num_shared ?? 0;
  const isNew = one.num_tokens > shared;
  return [...(one.branch ? [element("p", { class: "branch", text: `Branch ${one.branch}` })] : []),
    ...(one.shared ? [folded(`${plural(shared, "token")} as in branch ${one.shared_with}`, one.shared, false)] : []),
    ...(isNew ? [folded(`Context: ${plural(one.num_tokens - shared, "token")}`, one.text, true)] : [])];
}

function turn(one, tokens, versions, isOnly) {
  const said = [...tokens, ...cut(one.num_tokens - (one.num_drawn ?? 0), "token")];
  if (isOnly) return said;
  const calls = Object.entries(one.calls ?? {});
  const facts = [`${plural(one.num_tokens, "token")}${versions.length ? ` by ${versions.join(", ")}` : ""}`, ...(one.reward == null ? [] : [`reward ${figure(one.reward)}`]),
    ...(calls.length ? [`calls ${calls.map(([name, count]) => (count > 1 ? `${name} (${fixed(count)} times)` : name)).join(", ")}`] : [])];
  return [element("p", { class: "turn" }, element("b", { text: `Turn ${one.turn}` }), element("span", { text: facts.join(", ") })),
    element("div", { class: "said" }, ...said)];
}

/** Return the nodes of all that followed the prompt; tokens are numbered through all turns. */
function answer(t) {
  let at = 0;
  const nodes = t.stretches.flatMap((one) => {
    if (!one.turn) return context(one);
    const own = t.tokens.slice(at, at + (one.num_drawn ?? 0));
    const nodes = own.map((token, i) => element("span", { class: "token", "data-index": at + i, text: token.text }));
    at += own.length;
    return turn(one, nodes, [...new Set(own.map((token) => token.version))], t.num_turns === 1);
  });
  return [...nodes, ...(t.num_cut ? [element("p", { class: "cut", text: `[${plural(t.num_cut, "more part")} left out]` })] : [])];
}

function fill() {
  const t = shown;
  setText(byId("one-title"), t.found ? `Group g${t.group_id}, sibling ${t.sibling}` : `Group g${t.group_id}: its answers are not recorded`);
  const facts = !t.found ? (t.outcome ? [["outcome", t.outcome]] : []) : [["trained at step", fixed(t.step)], ["reward", figure(t.reward)],
    ...Object.entries(t.parts ?? {}).map(([name, value]) => [`reward, ${name}`, figure(value)]),
    ["ended by", t.finish_reason], ["temperature", figure(t.temperature)], ["tokens", fixed(t.num_chosen)],
    ...(t.num_turns > 1 ? [["turns", fixed(t.num_turns)], ["branches", fixed(t.num_branches)]] : [])];
  byId("facts").replaceChildren(...facts.map(([name, value]) => element("div", {}, element("dt", { text: name }), element("dd", { text: value }))));
  byId("prompt").replaceChildren(...excerpt({ head: t.prompt, num_cut: t.num_prompt_cut }));
  byId("images").hidden = !t.images?.length;
  byId("images").replaceChildren(...(t.images ?? []).map(picture));
  byId("failed").hidden = !t.failures.length;
  byId("failures").replaceChildren(...t.failures.map((text) => element("li", { text })));
  byId("answered").hidden = byId("kin").hidden = byId("tokens-table").hidden = !t.found;
  byId("answer").classList.toggle("several", t.num_turns > 1);
  byId("answer").replaceChildren(...answer(t));
  life(t.life ?? []);
  byId("siblings").replaceChildren(...(t.siblings ?? []).map((one) => element("li", {}, element("button", {
    type: "button", "aria-current": one.sibling === t.sibling ? "true" : null, text: `sibling ${one.sibling}: reward ${figure(one.reward)}`,
    on: { click: () => open(t.group_id, one.sibling) } }))));
  mark();
  setText(byId("token"), "");
  paint();
  table();
}

// A small copy from the run folder; where that has it no more, the reason is in its place.
function picture(digest) {
  const name = digest.slice(0, 8);
  const image = element("img", { src: `/image?digest=${encodeURIComponent(digest)}`, alt: `image ${name}`, loading: "lazy",
    on: { error: () => image.replaceWith(element("span", { class: "empty", text: `image ${name} cannot be shown` })) } });
  return element("li", {}, image);
}

// Tells in the list which trajectory is open.
function mark() {
  for (const button of byId("items").querySelectorAll("button")) {
    if (button.dataset.key === `${shown?.group_id}.${shown?.sibling}`) button.setAttribute("aria-current", "true");
    else button.removeAttribute("aria-current");
  }
}

// The first event with its time of day, the rest by the seconds after it.
function life(events) {
  const rows = events.map((event) => {
    const at = new Date(event.at_s * 1000), since = event.at_s - events[0].at_s;
    const text = event === events[0] ? at.toLocaleTimeString("en-GB") : `+${since < 100 ? fixed(since, 2) : fixed(since)} s`;
    return element("li", {}, element("time", { datetime: at.toISOString(), title: at.toLocaleString("en-GB"), text }), element("span", { text: event.what }));
  });
  byId("life").replaceChildren(...(rows.length ? rows : [element("li", { class: "empty", text: "The ledger keeps no event of it any more." })]));
}

const about = (token, i) => `token ${i + 1}, ${JSON.stringify(token.text)}: chosen by ${token.version}, lag ${token.lag}`
  + (Number.isFinite(token.diff) ? `, learner - engine logprob ${fixed(token.diff, 4)}` : "");

// Red: the learner finds the token less likely than the engine did; blue: more likely.
const diffColor = (diff) => between("--plain", diff < 0 ? "--less" : "--more", Math.min(1, Math.sqrt(Math.abs(diff) / STRONG)));

function paint() {
  if (!shown) return;
  const how = document.querySelector("input[name=coloring]:checked").value;
  const runs = runsOf(shown.tokens);
  const kinds = new Map([...new Set(runs.map((run) => run.version))].map((version, i) => [version, i % KINDS]));
  byId("answer").dataset.coloring = how;
  byId("answer").querySelectorAll(".token").forEach((node, i) => {
    const token = shown.tokens[i];
    node.className = how === "version" ? `token run${kinds.get(token.version)}` : "token";
    node.style.backgroundColor = how === "diff" && Number.isFinite(token.diff) ? diffColor(token.diff) : "";
  });
  byId("legend").replaceChildren(...legend(how, runs, kinds));
}

function legend(how, runs, kinds) {
  if (how === "version") {
    return runs.map((run) => element("li", {}, element("i", { class: `run${kinds.get(run.version)}`, "aria-hidden": "true" }),
      element("span", { text: `${run.version}, lag ${run.lag}: tokens ${run.first + 1} to ${run.first + run.count}` })));
  }
  if (how === "none") return [];
  const known = shown.tokens.map((token) => token.diff).filter(Number.isFinite);
  const mean = known.reduce((all, diff) => all + Math.abs(diff), 0) / Math.max(1, known.length);
  return [[-1, "learner: 1 nat less likely"], [0, "equal"], [1, "1 nat more likely"]].map(([diff, text]) => {
    const box = element("i", { "aria-hidden": "true" });
    box.style.backgroundColor = diffColor(diff);
    return element("li", {}, box, element("span", { text }));
  }).concat(element("li", { text: `mean absolute difference ${fixed(mean, 4)}` }));
}

function table() {
  if (!byId("tokens-table").open || !shown) return;
  fillTable(byId("tokens"), ["token", "text", "version", "lag", "logprob difference"], shown.tokens.map((token, i) =>
    [fixed(i + 1), element("code", { text: JSON.stringify(token.text) }), token.version, fixed(token.lag), fixed(token.diff, 4)]));
}

function fromAddress() {
  const match = /^#g(\d+)\/(\d+)$/.exec(location.hash);
  if (match) open(Number(match[1]), Number(match[2]));
}

export function create() {
  byId("search").addEventListener("submit", (event) => {
    event.preventDefault();
    search(byId("query").value.trim());
  });
  document.addEventListener("keydown", (event) => {
    const types = event.target.closest("input, textarea, select, [contenteditable]");
    if (event.key !== "/" || types || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    byId("query").focus();
  });
  byId("letters").addEventListener("toggle", letters);
  byId("coloring").addEventListener("change", paint);
  byId("tokens-table").addEventListener("toggle", table);
  byId("answer").addEventListener("pointerover", (event) => {
    const index = event.target.dataset?.index;
    if (index !== undefined) setText(byId("token"), about(shown.tokens[index], Number(index)));
  });
  onTheme(paint);
  window.addEventListener("hashchange", fromAddress);
  list("q=", "", "nothing is recorded yet (learner.rollouts_per_step)").then(fromAddress);
}
