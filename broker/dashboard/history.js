// The run's past as columns: rebuilt from /state.json, then kept by points from /events.

const MAX_ROWS = 2000;
const COUNTED = /^(dropped:|version:|issued|trained)/;

/** Columns of equal length over one axis (at_s or step). */
export class Columns {
  constructor(axis, served) {
    this.axis = axis;
    this.x = [...(served?.[axis] ?? [])];
    this.series = new Map(Object.entries(served?.series ?? {}).map(([name, values]) => [name, [...values]]));
  }

  get length() { return this.x.length; }

  /** Return the values of a series, or undefined. */
  get(name) { return this.series.get(name); }

  /** Return the newest number of a series, or null. */
  last(name) {
    const values = this.series.get(name);
    if (!values) return null;
    for (let i = values.length - 1; i >= 0; i -= 1) if (values[i] !== null) return values[i];
    return null;
  }

  /** Return the mean of the last `count` numbers of a series, or null. */
  recent(name, count) {
    const values = (this.series.get(name) ?? []).slice(-count).filter((value) => value !== null);
    return values.length ? values.reduce((a, b) => a + b, 0) / values.length : null;
  }

  /** Return what follows the prefix in the names of the series that have it. */
  names(prefix) {
    return [...this.series.keys()].filter((name) => name.startsWith(prefix)).map((name) => name.slice(prefix.length));
  }

  /** Add a row. One of the same x is replaced; later ones, of steps that were lost, are forgotten. */
  add(x, values) {
    while (this.x.length && this.x.at(-1) > x) {
      this.x.pop();
      for (const column of this.series.values()) column.pop();
    }
    const newest = this.x.at(-1);
    if (x !== newest) {
      this.x.push(x);
      for (const column of this.series.values()) column.push(null);
    }
    const row = this.x.length - 1;
    for (const [name, value] of Object.entries(values)) {
      if (!this.series.has(name)) this.series.set(name, new Array(this.x.length).fill(null));
      this.series.get(name)[row] = value;
    }
    if (this.x.length > MAX_ROWS) this.#halve();
  }

  // Pairs become one row, as the server does with its own: the later of a count, the mean of the rest.
  #halve() {
    const pairs = this.x.length >> 1;
    const odd = this.x.length % 2 ? 1 : 0;
    const merged = (values, join) => {
      const result = [];
      for (let i = 0; i < pairs; i += 1) result.push(join(values[2 * i], values[2 * i + 1]));
      if (odd) result.push(values.at(-1));
      return result;
    };
    const mean = (a, b) => (a === null ? b : b === null ? a : (a + b) / 2);
    const later = (a, b) => b ?? a;
    this.x = merged(this.x, later);
    for (const [name, values] of this.series) this.series.set(name, merged(values, COUNTED.test(name) ? later : mean));
  }
}
