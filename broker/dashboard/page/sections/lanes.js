// A lane per process: time from left to right, color is the share of it that the process was busy.

import { element, fillTable, setText } from "/static/dom.js";
import { clock, percent } from "/static/format.js";
import { meanOf } from "/static/history.js";
import { onTheme, rgb } from "/static/theme.js";

const MANY = 16; // lanes; more are thinner, and stand in a box of their own that scrolls
const LEAST_BUSY = 8; // of many, that the words about the picture name
const UNIT = "share of the time not spent waiting, over time since the start";
const TABLE_ROWS = 20;

export class Lanes {
  constructor(host) {
    this.host = host;
    this.lanes = [];
    this.x = [];
    this.width = 0;
    this.at = element("span", { class: "at" });
    this.rows = element("div", { class: "lanes", role: "img" });
    this.box = element("div", { class: "lane-box" }, this.rows);
    this.empty = element("p", { class: "empty", text: "No process has reported yet.", hidden: true });
    this.visible = false;
    this.ticks = element("div", { class: "lane-ticks", "aria-hidden": "true" });
    this.table = element("table");
    this.details = element("details", { class: "numbers" }, element("summary", { text: "Numbers" }),
      element("div", { class: "scroll" }, this.table));
    this.details.addEventListener("toggle", () => this.fill());
    this.unit = element("span", { class: "unit", text: UNIT });
    const scale = element("span", { class: "heat", "aria-hidden": "true" }, element("span", { text: "waiting 0%" }),
      ...Array.from({ length: 6 }, (_, i) => element("i", { class: `heat${i}` })), element("span", { text: "100% busy" }));
    this.scale = scale;
    host.classList.add("chart");
    host.replaceChildren(element("figcaption", {}, element("span", { class: "title", text: "Busy share of each process" }),
      this.unit, scale, this.at),
    this.box, this.ticks, this.empty, this.details);
    new IntersectionObserver(([entry]) => {
      this.visible = entry.isIntersecting;
      if (this.visible) this.paint();
    }, { rootMargin: "200px" }).observe(host);
    new ResizeObserver(() => this.fit()).observe(this.rows);
    onTheme(() => this.paint());
  }

  /** Take new numbers: x in seconds ascending; lanes [{name, values 0..1 or null}]; drawn when in sight. */
  update(x, lanes) {
    this.x = x;
    const names = lanes.map((lane) => lane.name).join("\n");
    this.lanes = lanes;
    this.empty.hidden = lanes.length > 0;
    this.ticks.hidden = this.details.hidden = this.scale.hidden = !lanes.length;
    if (names !== this.names) this.build();
    this.names = names;
    if (this.visible) this.paint();
    if (this.details.open) this.fill();
  }

  build() {
    const rows = this.lanes.map((lane) => {
      const canvas = element("canvas", { height: "1" });
      canvas.addEventListener("pointermove", (event) => this.hover(lane.name, event));
      canvas.addEventListener("pointerleave", () => setText(this.at, ""));
      return { canvas, value: element("span", { class: "value" }),
        name: element("span", { class: "name", text: lane.name, title: lane.name }) };
    });
    this.parts = rows;
    this.rows.replaceChildren(...rows.map((row) => element("div", { class: "lane" }, row.name, row.canvas, row.value)));
    const many = this.lanes.length > MANY;
    this.box.classList.toggle("many", many);
    setText(this.unit, many ? `${UNIT}; ${this.lanes.length} processes, the box scrolls` : UNIT);
    for (const [name, value] of [["tabindex", "0"], ["role", "region"], ["aria-label", "Busy share of each process"]]) {
      if (many) this.box.setAttribute(name, value);
      else this.box.removeAttribute(name);
    }
    this.fit();
  }

  fit() {
    const width = Math.floor(this.parts?.[0]?.canvas.clientWidth ?? 0);
    if (!width || width === this.width && this.parts[0].canvas.width === width) return;
    this.width = width;
    for (const { canvas } of this.parts) canvas.width = width;
    if (this.visible) this.paint();
  }

  paint() {
    this.colors();
    if (!this.width || !this.x.length) return;
    const [from, to] = [this.x[0], this.x.at(-1)];
    this.lanes.forEach((lane, i) => {
      const pixels = this.parts[i].canvas.getContext("2d");
      pixels.putImageData(this.strip(lane.values, from, to), 0, 0);
      setText(this.parts[i].value, percent(lane.values.at(-1)));
    });
    const marks = this.width > 500 ? [0, 0.25, 0.5, 0.75, 1] : [0, 0.5, 1];
    this.ticks.replaceChildren(...marks.map((share) => element("span", { text: clock(from + (to - from) * share) })));
    this.rows.setAttribute("aria-label", this.summary());
  }

  summary() {
    const now = this.lanes.map(({ name, values }) => ({ name, share: values.at(-1) ?? null }));
    const spell = (some) => some.map(({ name, share }) => `${name} ${share === null ? "unknown" : percent(share)}`).join(", ");
    if (now.length <= MANY) return `Busy share by process, newest: ${spell(now)}.`;
    const least = now.toSorted((a, b) => (a.share ?? -1) - (b.share ?? -1)).slice(0, LEAST_BUSY);
    return `Busy share of ${now.length} processes, newest: ${percent(meanOf(now.map(({ share }) => share)))} on average; least: ${spell(least)}.`;
  }

  colors() {
    const [low, high] = [rgb("--heat-low"), rgb("--heat-high")];
    this.ramp = Array.from({ length: 65 }, (_, i) => [...low.map((value, c) => Math.round(value + (high[c] - value) * (i / 64))), 255]);
    this.scale.querySelectorAll("i").forEach((box, i) => {
      box.style.backgroundColor = `rgb(${this.ramp[Math.round((i / 5) * 64)].slice(0, 3).join(" ")})`;
    });
  }

  // One row of pixels; each is the mean of the samples that fall on it, or the sample that covers it.
  strip(values, from, to) {
    const image = new ImageData(this.width, 1);
    const per = (this.width - 1) / Math.max(to - from, 1e-9);
    let sample = 0;
    for (let px = 0; px < this.width; px += 1) {
      const until = from + px / per;
      let total = 0, count = 0;
      while (sample < this.x.length - 1 && this.x[sample] < until) {
        if (values[sample] !== null) { total += values[sample]; count += 1; }
        sample += 1;
      }
      const share = count ? total / count : values[sample];
      if (share === null || share === undefined) continue; // transparent: not known
      const color = this.ramp[Math.round(Math.max(0, Math.min(1, share)) * 64)];
      image.data.set(color, px * 4);
    }
    return image;
  }

  hover(name, event) {
    const lane = this.lanes.find((one) => one.name === name);
    const box = event.target.getBoundingClientRect();
    const at = this.x[0] + (this.x.at(-1) - this.x[0]) * Math.max(0, Math.min(1, (event.clientX - box.left) / box.width));
    let index = this.x.findIndex((x) => x >= at);
    if (index < 0) index = this.x.length - 1;
    setText(this.at, `${name} at ${clock(this.x[index])}: ${percent(lane.values[index])}`);
  }

  fill() {
    if (!this.details.open) return;
    const every = Math.max(1, Math.ceil(this.x.length / TABLE_ROWS));
    const rows = [];
    for (let i = this.x.length - 1; i >= 0; i -= every) {
      rows.push([clock(this.x[i]), ...this.lanes.map((lane) => percent(lane.values[i]))]);
    }
    fillTable(this.table, ["time", ...this.lanes.map((lane) => lane.name)], rows);
  }
}
