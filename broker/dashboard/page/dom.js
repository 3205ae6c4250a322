// Building elements. Text goes in through textContent only, so nothing served can become markup.

export const byId = (id) => document.getElementById(id);

/** Return a new element; `set` holds text, class and attributes, the rest are its children. */
export function element(tag, set = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(set)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "text") node.textContent = value;
    else if (name === "class") node.className = value;
    else if (name === "on") for (const [event, act] of Object.entries(value)) node.addEventListener(event, act);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children);
  return node;
}

/** Set the text of a node if it differs: a screen reader speaks and a browser lays out changes only. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Return a table row; a cell is text or a node. */
function line(cells, tag) {
  return element("tr", {}, ...cells.map((cell) => {
    const node = element(tag, tag === "th" ? { scope: "col" } : {});
    node.append(cell);
    return node;
  }));
}

/** Put nodes into a host; one that is there already and equal stays as it is. */
function refresh(host, nodes) {
  nodes.forEach((node, i) => {
    const old = host.children[i];
    if (!old) host.append(node);
    else if (!old.isEqualNode(node)) old.replaceWith(node);
  });
  while (host.children.length > nodes.length) host.lastElementChild.remove();
}

/** Fill a table that stands in the page. */
export function fillTable(table, head, rows) {
  refresh(table.tHead ?? table.createTHead(), [line(head, "th")]);
  refresh(table.tBodies[0] ?? table.createTBody(), rows.map((cells) => line(cells, "td")));
}

/**
 * Show one child of a host per item, in their order. The child of a key stays the same node, so what
 * is open in it stays open and the keyboard's focus stays in it.
 * key: item -> text; make: item -> node; fill: (node, item), every time.
 */
export function keep(host, items, { key, make, fill }) {
  const focused = document.activeElement;
  const old = new Map([...host.children].map((node) => [node.dataset.kept, node]));
  const nodes = items.map((item) => {
    const name = key(item);
    const node = old.get(name) ?? make(item);
    node.dataset.kept = name;
    old.delete(name);
    fill(node, item);
    return node;
  });
  for (const node of old.values()) node.remove();
  nodes.forEach((node, i) => { if (host.children[i] !== node) host.insertBefore(node, host.children[i] ?? null); });
  if (focused !== document.activeElement && host.contains(focused)) focused.focus({ preventScroll: true });
}

function bar(row) {
  const parts = [element("span", { class: "name" }), element("span", { class: "track", "aria-hidden": "true" }, element("span", { class: "fill" })),
    element("span", { class: "value" })];
  return element("li", {}, row.act
    ? element("button", { type: "button", class: "bar", on: { click: row.act } }, ...parts)
    : element("div", { class: "bar" }, ...parts));
}

function fillBar(node, row) {
  const fill = node.querySelector(".fill");
  fill.style.width = `${Math.max(0, Math.min(1, row.share)) * 100}%`;
  fill.style.backgroundColor = row.color ?? "";
  setText(node.querySelector(".name"), row.name);
  setText(node.querySelector(".value"), row.value);
  if (row.hint) node.firstElementChild.title = row.hint;
}

/**
 * Show horizontal bars in a host, or a word where there are none. A row: key, name, share of the
 * longest bar (0..1), value as text, color, act (what a click does), hint.
 */
export function bars(host, rows, none) {
  if (!rows.length) {
    host.replaceChildren(element("p", { class: "empty", text: none }));
    return;
  }
  const list = host.querySelector("ul.bars") ?? element("ul", { class: "bars" });
  if (list.parentNode !== host) host.replaceChildren(list);
  keep(list, rows, { key: (row) => String(row.key), make: bar, fill: fillBar });
}

/** Return a check whether a value differs from the last one under this name. */
export function changes() {
  const seen = new Map();
  return (name, value) => {
    const text = JSON.stringify(value);
    if (seen.get(name) === text) return false;
    seen.set(name, text);
    return true;
  };
}
