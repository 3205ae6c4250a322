// The newest lines of each process's log, read while they are in sight.

import { ask } from "/static/ask.js";
import { byId, element, keep, setText } from "/static/dom.js";

const EVERY_MS = 5000;
let visible = false, timer = null;

function make() {
  return element("details", {}, element("summary", {}, element("span", { class: "name" }), element("span", { class: "last" })),
    element("pre", { tabindex: "0", role: "region" }));
}

function fill(node, { name, lines, written_s: written }) {
  node.firstElementChild.title = `written at ${new Date(1000 * written).toLocaleString("en-GB")}`;
  setText(node.querySelector(".name"), name);
  setText(node.querySelector(".last"), lines.at(-1) ?? "(empty)");
  const text = node.querySelector("pre");
  text.setAttribute("aria-label", `Log of ${name}`);
  const atEnd = text.scrollTop + text.clientHeight >= text.scrollHeight - 4;
  setText(text, lines.join("\n"));
  if (atEnd) text.scrollTop = text.scrollHeight;
}

async function read(live) {
  clearTimeout(timer);
  try {
    const { logs } = await ask("/logs.json");
    setText(byId("logs-note"), logs.length ? "" : "No log is in the run's folder on this host: roles started by hand write to standard error.");
    keep(byId("logs-list"), logs, { key: (log) => log.name, make, fill });
  } catch (error) {
    setText(byId("logs-note"), `not read: ${error.message}`);
  }
  if (visible && live()) timer = setTimeout(() => { if (visible && !document.hidden) read(live); }, EVERY_MS);
}

/** Read logs whenever they come into sight, and again while they stay there and the run is live. */
export function create(live) {
  new IntersectionObserver((entries) => {
    visible = entries.at(-1).isIntersecting;
    if (visible) read(live);
  }).observe(byId("logs"));
}
