// Dark or light: the system's choice, or an earlier one made here.

const KEY = "slipstream-theme";
const system = window.matchMedia("(prefers-color-scheme: dark)");
const listeners = [];
let colors = new Map();

const chosen = () => {
  try { return localStorage.getItem(KEY); } catch { return null; }
};

function apply(theme) {
  document.documentElement.dataset.theme = theme;
  colors = new Map();
  for (const act of listeners) act();
}

const current = () => chosen() ?? (system.matches ? "dark" : "light");

/** Show the theme and let the button change it. */
export function startTheme(button) {
  const show = () => {
    apply(current());
    const other = current() === "dark" ? "light" : "dark";
    button.textContent = other === "dark" ? "Dark" : "Light";
    button.setAttribute("aria-label", `Change to ${other} colors`);
  };
  button.addEventListener("click", () => {
    const other = current() === "dark" ? "light" : "dark";
    try { localStorage.setItem(KEY, other); } catch { /* private window: until the next load */ }
    document.documentElement.dataset.theme = other;
    show();
  });
  system.addEventListener("change", show);
  show();
}

export const onTheme = (act) => listeners.push(act);

/** Return what a custom property of the page, such as --c1, stands for now. */
export function color(name) {
  if (!name.startsWith("--")) return name;
  if (!colors.has(name)) {
    colors.set(name, getComputedStyle(document.documentElement).getPropertyValue(name).trim());
  }
  return colors.get(name);
}

/** Return [r, g, b] of a property that holds #rrggbb. */
export function rgb(name) {
  const hex = color(name).slice(1);
  return [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

/** Return the color at `share` (0..1) of the way between two properties. */
export function between(from, to, share) {
  const [a, b] = [rgb(from), rgb(to)];
  return `rgb(${a.map((value, i) => Math.round(value + (b[i] - value) * share)).join(" ")})`;
}

/** Return the color of a staleness: the older, the stronger. */
export const lagColor = (lag, bound) => between("--lag-from", "--lag-to", bound > 0 ? Math.min(1, lag / bound) : 0);
