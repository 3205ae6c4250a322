// The run's past as columns: rebuilt from /state.json, then kept by points from /events.

const MAX_ROWS = 2000;
const COUNTED = /^(dropped:|version:|issued|trained|answers|retracted)/;
const HIGHEST = /[_/]max(@lag\d+)?$/;

/** Return the mean of the known values, or null. */
export function meanOf(values) {
  const known = values.filter((value) => value !== null && value !== undefined);
  return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
}

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

  /**
   * Return the newest rows that reach back so far: {from, lasted}, their first row and how much of
   * the axis they stand for; rows far apart stand for more than requested. No rows: lasted is 0.
   */
  window(reach) {
    const newest = this.x.at(-1);
    let from = this.x.length - 1;
    while (from > 0 && newest - this.x[from - 1] < reach - 1e-6) from -= 1;
    return { from: Math.max(0, from), lasted: this.x.length ? newest - (this.x[from - 1] ?? 0) : 0 };
  }

  /** Return the mean of the rows of a window, or null where the newest is not known. */
  recent(name, { from }) {
    const values = this.series.get(name);
    if (!values?.length || values.at(-1) === null) return null;
    return meanOf(values.slice(from));
  }

  /** Forget the rows after x: they did not happen. */
  forgetAfter(x) {
    while (this.x.length && this.x.at(-1) > x) {
      this.x.pop();
      for (const column of this.series.values()) column.pop();
    }
  }

  /** Add the rows of other columns that are later than all of these. */
  goOn(other) {
    const last = this.x.at(-1) ?? -Infinity;
    other.x.forEach((x, row) => {
      if (x > last) this.add(x, Object.fromEntries([...other.series].map(([name, values]) => [name, values[row]])));
    });
  }

  /** Return what follows the prefix in the names of the series that have it. */
  names(prefix) {
    return [...this.series.keys()].filter((name) => name.startsWith(prefix)).map((name) => name.slice(prefix.length));
  }

  /** Add a row. One of the same x is replaced; later ones, of steps that were lost, are forgotten. */
  add(x, values) {
    this.forgetAfter(x);
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

  // Pairs become one row, as the server does with its own: the later of a count, the larger of a maximum, the mean of the rest.
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
    const higher = (a, b) => (a === null ? b : b === null ? a : Math.max(a, b));
    const joined = (name) => (COUNTED.test(name) ? later : HIGHEST.test(name) ? higher : mean);
    this.x = merged(this.x, later);
    for (const [name, values] of this.series) this.series.set(name, merged(values, joined(name)));
  }
}
