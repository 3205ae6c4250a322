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
export function say(node, text) {
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

/** Fill a table that stands in the page. */
export function fillTable(table, head, rows) {
  let [top, body] = [table.tHead, table.tBodies[0]];
  if (!top) {
    top = table.createTHead();
    top.append(line(head, "th"));
  }
  body ??= table.createTBody();
  body.replaceChildren(...rows.map((cells) => line(cells, "td")));
}

/** Return horizontal bars. A row: label, share of the longest bar (0..1), value as text, color, act. */
export function bars(rows) {
  return element("ul", { class: "bars" }, ...rows.map((row) => {
    const fill = element("span", { class: "fill" });
    fill.style.width = `${Math.max(0, Math.min(1, row.share)) * 100}%`;
    if (row.color) fill.style.backgroundColor = row.color;
    const parts = [
      element("span", { class: "name", text: row.name }),
      element("span", { class: "track", "aria-hidden": "true" }, fill),
      element("span", { class: "value", text: row.value }),
    ];
    const inside = row.act
      ? element("button", { type: "button", class: "bar", title: row.hint, on: { click: row.act } }, ...parts)
      : element("div", { class: "bar" }, ...parts);
    return element("li", {}, inside);
  }));
}

/** Return a check whether a value differs from the one it was last asked about under this name. */
export function changes() {
  const seen = new Map();
  return (name, value) => {
    const text = JSON.stringify(value);
    if (seen.get(name) === text) return false;
    seen.set(name, text);
    return true;
  };
}
