// A lane per process: time from left to right, color is the share of it that the process was busy.

import { element, fillTable, say } from "/static/dom.js";
import { clock, percent } from "/static/format.js";
import { onTheme, rgb } from "/static/theme.js";

const MOST = 48;
const TABLE_ROWS = 20;

export class Lanes {
  constructor(host) {
    this.host = host;
    this.lanes = [];
    this.x = [];
    this.width = 0;
    this.at = element("span", { class: "at" });
    this.rows = element("div", { class: "lanes", role: "img" });
    this.ticks = element("div", { class: "lane-ticks", "aria-hidden": "true" });
    this.table = element("table");
    this.details = element("details", { class: "numbers" }, element("summary", { text: "Numbers" }),
      element("div", { class: "scroll" }, this.table));
    this.details.addEventListener("toggle", () => this.fill());
    const scale = element("span", { class: "heat", "aria-hidden": "true" }, element("span", { text: "waiting 0%" }),
      ...Array.from({ length: 6 }, (_, i) => element("i", { class: `heat${i}` })), element("span", { text: "100% busy" }));
    this.scale = scale;
    host.classList.add("chart");
    host.replaceChildren(element("figcaption", {}, element("span", { class: "title", text: "Busy share of each process" }),
      element("span", { class: "unit", text: "share of the time not spent waiting, over time since the start" }), scale, this.at),
    this.rows, this.ticks, this.details);
    new ResizeObserver(() => this.fit()).observe(this.rows);
    onTheme(() => this.paint());
  }

  /** Take new numbers: x in seconds ascending; lanes [{name, values 0..1 or null}]. */
  update(x, lanes) {
    this.x = x;
    const names = lanes.map((lane) => lane.name).join("\n");
    this.left = Math.max(0, lanes.length - MOST);
    this.lanes = lanes.slice(0, MOST);
    if (names !== this.names) this.build();
    this.names = names;
    this.paint();
    if (this.details.open) this.fill();
  }

  build() {
    const rows = this.lanes.map((lane) => {
      const canvas = element("canvas", { height: "1" });
      canvas.addEventListener("pointermove", (event) => this.hover(lane.name, event));
      canvas.addEventListener("pointerleave", () => say(this.at, ""));
      return { canvas, value: element("span", { class: "value" }),
        name: element("span", { class: "name", text: lane.name, title: lane.name }) };
    });
    this.parts = rows;
    this.rows.replaceChildren(...rows.map((row) => element("div", { class: "lane" }, row.name, row.canvas, row.value)));
    if (this.left) this.rows.append(element("p", { class: "note", text: `and ${this.left} more processes, in the table of workers` }));
    this.fit();
  }

  fit() {
    const width = Math.floor(this.parts?.[0]?.canvas.clientWidth ?? 0);
    if (!width || width === this.width && this.parts[0].canvas.width === width) return;
    this.width = width;
    for (const { canvas } of this.parts) canvas.width = width;
    this.paint();
  }

  paint() {
    this.colors();
    if (!this.width || !this.x.length) return;
    const [from, to] = [this.x[0], this.x.at(-1)];
    this.lanes.forEach((lane, i) => {
      const pixels = this.parts[i].canvas.getContext("2d");
      pixels.putImageData(this.strip(lane.values, from, to), 0, 0);
      say(this.parts[i].value, percent(newest(lane.values)));
    });
    const marks = this.width > 500 ? [0, 0.25, 0.5, 0.75, 1] : [0, 0.5, 1];
    this.ticks.replaceChildren(...marks.map((share) => element("span", { text: clock(from + (to - from) * share) })));
    const text = this.lanes.map((lane) => `${lane.name} ${percent(newest(lane.values))}`).join(", ");
    this.rows.setAttribute("aria-label", `Busy share by process, newest: ${text}.`);
  }

  colors() {
    const [low, high] = [rgb("--heat-low"), rgb("--heat-high")];
    this.ramp = Array.from({ length: 65 }, (_, i) => low.map((value, c) => Math.round(value + (high[c] - value) * (i / 64))));
    this.scale.querySelectorAll("i").forEach((box, i) => {
      box.style.backgroundColor = `rgb(${this.ramp[Math.round((i / 5) * 64)].join(" ")})`;
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
      image.data.set([...color, 255], px * 4);
    }
    return image;
  }

  hover(name, event) {
    const lane = this.lanes.find((one) => one.name === name);
    const box = event.target.getBoundingClientRect();
    const at = this.x[0] + (this.x.at(-1) - this.x[0]) * Math.max(0, Math.min(1, (event.clientX - box.left) / box.width));
    let index = this.x.findIndex((x) => x >= at);
    if (index < 0) index = this.x.length - 1;
    say(this.at, `${name} at ${clock(this.x[index])}: ${percent(lane.values[index])}`);
  }

  fill() {
    if (!this.details.open) return;
    const every = Math.max(1, Math.ceil(this.x.length / TABLE_ROWS));
    const rows = [];
    for (let i = this.x.length - 1; i >= 0; i -= every) {
      rows.push([clock(this.x[i]), ...this.lanes.map((lane) => percent(lane.values[i]))]);
    }
    this.table.replaceChildren();
    fillTable(this.table, ["time", ...this.lanes.map((lane) => lane.name)], rows);
  }
}

function newest(values) {
  for (let i = values.length - 1; i >= 0; i -= 1) if (values[i] !== null) return values[i];
  return null;
}
