// One chart: axes with units, values on hover, a summary in words, and its numbers as a table.
/* global uPlot */

import { element, fillTable, setText } from "/static/dom.js";
import { byStep, clock, figure, fixed } from "/static/format.js";
import { color, onTheme } from "/static/theme.js";

const TABLE_ROWS = 24;
const AXES = {
  step: { title: "learner step", tick: (x) => `${x}`, hover: (x) => `step ${x}` },
  time: { title: "time since the start", tick: clock, hover: (x) => `at ${clock(x)}` },
};
const FONT = "11px system-ui, sans-serif";
const TIME_STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];
const WHOLE_STEPS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000,
  500000, 1000000];
const FAINT = "55"; // of ff, appended to a color
const all = new Set();

const inSight = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    const chart = [...all].find((one) => one.plot === entry.target);
    chart.visible = entry.isIntersecting;
    if (chart.visible) chart.draw();
  }
}, { rootMargin: "200px" });

const resized = new ResizeObserver((entries) => {
  for (const entry of entries) {
    const chart = [...all].find((one) => one.plot === entry.target);
    chart.fit(Math.floor(entry.contentRect.width));
  }
});

onTheme(() => { for (const chart of all) chart.rebuild(); });

export class Chart {
  /**
   * host: the figure element. title, unit: what is shown. axis: "step", "time", or
   * {title, tick, hover}. stacked: series are parts of a whole. bars: a bar per x.
   * low, high: bounds that the y axis has at least. show: a value as text. tick: a value of the
   * axis as text, given the distance of its ticks. whole: values are counts.
   * stepped: a value holds until the next. near: where a series has no value, hovering shows the one before.
   */
  constructor(host, { title, unit, axis, stacked = false, bars = false, low = null, high = null, show = figure,
    height = 170, tick = null, whole = false,
    stepped = false, near = false }) {
    Object.assign(this, { host, title, unit, stacked, bars, low, high, show, height, whole, stepped, near, log: false, visible: false, dirty: false });
    this.tick = tick ?? byStep;
    this.kind = typeof axis === "string" ? axis : "other";
    this.axis = typeof axis === "string" ? AXES[axis] : axis;
    this.x = [];
    this.series = [];
    this.keys = element("ul", { class: "keys" });
    this.at = element("p", { class: "at" });
    this.plot = element("div", { class: "plot", role: "img" });
    this.empty = element("p", { class: "empty", text: "No values yet.", hidden: true });
    this.table = element("table");
    this.details = element("details", { class: "numbers" }, element("summary", { text: "Numbers" }),
      element("div", { class: "scroll" }, this.table));
    this.details.addEventListener("toggle", () => this.fill());
    host.classList.add("chart");
    this.caption = element("figcaption", {}, element("span", { class: "title", text: title }), element("span", { class: "unit", text: unit }));
    host.replaceChildren(this.caption, this.keys, this.plot, this.empty,
    element("div", { class: "foot" }, this.details, this.at));
    this.plot.style.height = `${height}px`;
    all.add(this);
    inSight.observe(this.plot);
    resized.observe(this.plot);
  }

  /** Show something else from now on: its title, its axis, and whether values are drawn by their logarithm. */
  name(title, axis, log) {
    if (axis !== this.axis || log !== this.log) this.drop();
    Object.assign(this, { title, axis, log, kind: axis.steps ?? "other", unit: log ? "logarithmic" : "" });
    [title, this.unit].forEach((text, i) => setText(this.caption.children[i], text));
  }

  /**
   * Take new numbers: x ascending; series [{name, values, color, dots, gaps, dashed, quiet}]; drawn when in
   * sight. A quiet series is drawn faintly and not named: another one of its name says the same.
   * note: row -> words about it; marked: row -> whether to point at it; rest: words without a pointer.
   */
  update(x, series, { note = null, marked = null, rest = "" } = {}) {
    const same = this.series.length === series.length && this.series.every((old, i) => lookOf(old) === lookOf(series[i]));
    this.x = x;
    this.series = series;
    Object.assign(this, { note, marked, rest });
    this.dirty = true;
    const some = x.length > 0 && series.some((one) => one.values.some(isKnown));
    this.plot.hidden = this.details.hidden = !some; // hidden or not before it comes into sight
    this.empty.hidden = some;
    if (!same) this.rekey();
    if (this.visible) this.draw();
  }

  rekey() {
    this.drop();
    this.values = this.series.map(() => element("b"));
    this.swatches = this.series.map(() => element("i", { "aria-hidden": "true" }));
    this.keys.replaceChildren(...this.series.map((one, i) =>
      element("li", { hidden: one.quiet }, this.swatches[i], element("span", { text: one.name }), this.values[i])));
    this.paintKeys();
  }

  paintKeys() {
    this.series.forEach((one, i) => { this.swatches[i].style.backgroundColor = color(one.color); });
  }

  drop() {
    this.drawn?.destroy();
    this.drawn = null;
    this.zoomed = false;
  }

  rebuild() {
    this.drop();
    if (!this.series.length) return;
    this.paintKeys();
    this.dirty = true;
    if (this.visible) this.draw();
  }

  fit(width) {
    if (width === this.width || width < 40) return;
    this.width = width;
    if (this.drawn) this.drawn.setSize({ width, height: this.height });
    else if (this.visible) this.draw();
  }

  draw() {
    if (!this.dirty || !this.width || this.plot.hidden) return;
    this.dirty = false;
    const data = [this.x, ...this.columns()];
    this.drawnOver = [this.x[0], this.x.at(-1)]; // the column itself grows
    if (!this.drawn) this.drawn = new uPlot(this.options(), data, this.plot);
    else {
      this.drawn.setData(data, !this.zoomed);
      if (this.zoomed) this.drawn.redraw();
    }
    this.hover(this.drawn.cursor.idx);
    this.plot.setAttribute("aria-label", this.summary());
    if (this.details.open) this.fill();
  }

  // Stacked series are drawn from the top down, each filled to the ground.
  columns() {
    if (!this.stacked) return this.series.map((one) => one.values);
    const total = new Array(this.x.length).fill(0);
    const tops = this.series.map((one) => one.values.map((value, i) => (total[i] += value ?? 0)));
    return tops.reverse();
  }

  options() {
    const order = this.stacked ? [...this.series].reverse() : this.series;
    const grid = { stroke: color("--grid"), width: 1 };
    const side = { stroke: color("--dim"), font: FONT, grid, ticks: { stroke: color("--grid"), width: 1, size: 4 } };
    const incrs = { time: TIME_STEPS, step: WHOLE_STEPS, other: WHOLE_STEPS, any: undefined }[this.kind];
    return {
      width: this.width, height: this.height, legend: { show: false }, padding: [8, 18, 0, 0],
      scales: {
        x: { time: false, range: (_, low, high) => this.rangeX(low, high) },
        y: this.log ? { distr: 3, range: (_, low, high) => this.rangeLog(low, high) } : { range: (_, low, high) => this.rangeY(low, high) },
      },
      axes: [
        { ...side, size: 20, incrs, space: 60, gap: 4, label: this.axis.title, labelFont: FONT, labelSize: 16, labelGap: 0,
          values: (_, ticks) => ticks.map((x) => this.axis.tick(x)) },
        { ...side, size: 48, space: 28, gap: 4, incrs: this.whole ? WHOLE_STEPS : undefined, values: (_, ticks) => this.ticks(ticks) },
      ],
      cursor: { y: false, points: { size: 6, show: !this.stacked }, drag: { x: true, y: false },
        sync: this.kind === "time" ? { key: "time" } : undefined },
      series: [{}, ...order.map((one) => this.line(one))],
      hooks: {
        draw: [(plot) => this.mark(plot)],
        setCursor: [(plot) => this.hover(plot.cursor.idx)],
        setScale: [(plot, name) => { if (name === "x") this.zoomed = this.isPart(plot.scales.x); }],
      },
    };
  }

  ticks(ticks) {
    if (this.log) return ticks.map((y) => (y === null ? "" : y >= 0.001 && y < 100000 ? fixed(y, Math.max(0, -Math.floor(Math.log10(y) + 1e-9))) : y.toExponential(0)));
    return ticks.map((y) => this.tick(y, ticks.length > 1 ? ticks[1] - ticks[0] : Math.abs(y) || 1));
  }

  // True if zoomed: fewer rows are shown than drawn.
  isPart({ min, max }) {
    const [first, last] = this.drawnOver;
    return first !== last && (min > first || max < last);
  }

  // A triangle over each row that needs attention.
  mark(plot) {
    if (!this.marked) return;
    const { ctx, bbox } = plot, size = 5 * devicePixelRatio;
    ctx.fillStyle = color("--bad");
    this.x.forEach((x, row) => {
      if (!this.marked(row)) return;
      const at = plot.valToPos(x, "x", true);
      ctx.beginPath();
      ctx.moveTo(at - size, bbox.top);
      ctx.lineTo(at + size, bbox.top);
      ctx.lineTo(at, bbox.top + 1.6 * size);
      ctx.fill();
    });
  }

  line(one) {
    const stroke = color(one.color) + (one.quiet ? FAINT : "");
    const shape = { label: one.name, stroke, width: one.quiet ? 1 : 1.6, dash: one.dashed ? [6, 4] : undefined, spanGaps: one.gaps !== true, points: { show: false } };
    if (one.dots) shape.points = { show: true, size: 5, fill: stroke, stroke };
    if (this.stacked) Object.assign(shape, { fill: stroke, width: 0 });
    if (this.stepped) shape.paths = uPlot.paths.stepped({ align: 1 });
    if (this.bars) Object.assign(shape, { paths: uPlot.paths.bars({ size: [0.75, 28] }) });
    return shape;
  }

  rangeX(low, high) {
    if (this.bars) return [low - 0.6, Math.max(high, low + 5) + 0.6];
    return low === high ? [low - 0.5, high + 0.5] : [low, high];
  }

  rangeY(low, high) {
    let from = Math.min(low ?? 0, this.low ?? low ?? 0), to = Math.max(high ?? 1, this.high ?? high ?? 1);
    if (this.stacked || this.bars) from = 0;
    if (from === to) to = from + (Math.abs(from) || 1) * 0.1;
    const room = (to - from) * (this.marked ? 0.12 : 0.06);
    return [from === this.low || from === 0 ? from : from - room, to === this.high ? to : to + room];
  }

  // A little room; nothing to draw has a range as well.
  rangeLog(low, high) {
    if (!(low > 0)) return [0.1, 1];
    return low === high ? [low / 2, high * 2] : [low / 1.1, high * 1.1];
  }

  // With no index: the newest values.
  hover(index) {
    const newest = index === null || index === undefined;
    this.series.forEach((one, i) => {
      const value = newest ? now(one) : this.near ? before(one.values, index) : one.values[index];
      setText(this.values[i], isKnown(value) ? this.show(value) : newest ? "-" : "");
    });
    const note = newest ? "" : this.note?.(index) ?? "";
    setText(this.at, newest ? this.rest : [this.axis.hover(this.x[index]), note].filter(Boolean).join(": "));
  }

  summary() {
    const parts = this.series.filter((one) => !one.quiet).map((one) => {
      const known = one.values.filter(isKnown);
      if (!known.length) return `${one.name}: no values`;
      const low = known.reduce((a, b) => Math.min(a, b)), high = known.reduce((a, b) => Math.max(a, b));
      return `${one.name}: now ${isKnown(now(one)) ? this.show(now(one)) : "unknown"}, from ${this.show(low)} to ${this.show(high)}`;
    });
    return `Chart. ${this.title}, ${this.unit}, by ${this.axis.title}. ${parts.join("; ")}. ${this.rest}`.trim();
  }

  fill() {
    if (!this.details.open) return;
    const every = this.bars ? 1 : Math.max(1, Math.ceil(this.x.length / TABLE_ROWS));
    const rows = [], named = this.series.filter((one) => !one.quiet);
    for (let i = this.x.length - 1; i >= 0; i -= every) {
      rows.push([this.axis.hover(this.x[i]), ...named.map((one) => this.show(one.values[i] ?? null)),
        ...(this.note ? [this.note(i)] : [])]);
    }
    fillTable(this.table, [this.axis.title, ...named.map((one) => one.name), ...(this.note ? ["what"] : [])], rows);
  }
}

const isKnown = (value) => value !== null && value !== undefined;

/** Return what a series is drawn with, as text. */
const lookOf = ({ name, color: own, dashed, quiet, dots }) => JSON.stringify([name, own, dashed, quiet, dots]);

/** Return the value of a row, or of the nearest one before it that has any. */
function before(values, index) {
  for (let i = index; i >= 0; i -= 1) if (isKnown(values[i])) return values[i];
  return null;
}

/** Return the newest value of a series; where gaps count, that of the newest row even if it is none. */
const now = (one) => (one.gaps ? one.values.at(-1) : one.values.findLast(isKnown)) ?? null;
