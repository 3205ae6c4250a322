// Numbers as text, always in the same way.

const formats = new Map();

/** Return a number with this many decimals and grouped thousands. */
export function fixed(value, digits = 0) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "-";
  if (!formats.has(digits)) {
    formats.set(digits, new Intl.NumberFormat("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }));
  }
  return formats.get(digits).format(value);
}

/** Return a measured value with three figures or so. */
export function figure(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "-";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 100) return fixed(value, 0);
  if (size >= 10) return fixed(value, 1);
  if (size >= 1) return fixed(value, 2);
  if (size >= 0.0001) return fixed(value, size >= 0.1 ? 3 : size >= 0.001 ? 4 : 5);
  return value.toExponential(1);
}

/** Return the number of decimals that separate values differing by `step`: 1 for 0.1, 2 for 0.25. */
function decimals(step) {
  for (let digits = 0; digits < 8; digits += 1) {
    if (Math.abs(step * 10 ** digits - Math.round(step * 10 ** digits)) < 1e-6) return digits;
  }
  return 8;
}

/** Return a tick of an axis whose ticks are `step` apart. */
export const byStep = (value, step) => fixed(value, decimals(step));

/** Return a tick of an axis of shares. */
export const percentByStep = (value, step) => `${fixed(100 * value, decimals(100 * step))}%`;

export const percent = (share, digits = 0) =>
  (share === null || share === undefined || !Number.isFinite(share) ? "-" : `${fixed(100 * share, digits)}%`);

/** Return seconds in words. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "-";
  if (seconds < 10) return `${fixed(seconds, 1)} s`;
  if (seconds < 120) return `${fixed(seconds, 0)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 120) return `${minutes} min ${String(Math.floor(seconds % 60)).padStart(2, "0")} s`;
  return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
}

/** Return seconds since the start for a tick of an axis. */
export function clock(seconds) {
  const [h, m, s] = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60, Math.floor(seconds % 60)];
  const two = (n) => String(n).padStart(2, "0");
  return h ? `${h}:${two(m)}:${two(s)}` : `${m}:${two(s)}`;
}

/** Return bytes with a unit. */
export function bytes(count) {
  if (!Number.isFinite(count)) return "-";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let value = count, unit = 0;
  while (value >= 1000 && unit < units.length - 1) { value /= 1000; unit += 1; }
  return `${unit ? figure(value) : fixed(value)} ${units[unit]}`;
}

export const plural = (count, one, many = `${one}s`) => `${fixed(count)} ${count === 1 ? one : many}`;
export const words = (name) => name.replaceAll("_", " ");
export const label = (version) => (version ? `v${version[0]}.${version[1]}` : "-");
export const sum = (counts) => Object.values(counts).reduce((a, b) => a + b, 0);

/** Return the mean reward of an evaluation's figures: its mean@n. */
export function meanReward(figures) {
  const name = Object.keys(figures.metrics).find((key) => key.startsWith("mean@"));
  return name ? figures.metrics[name] : null;
}
