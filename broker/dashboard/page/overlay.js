// One figure of several runs over each other, and the same as a picture.

import { Chart } from "/static/chart.js";
import { clock, figure, fixed } from "/static/format.js";
import { color } from "/static/theme.js";

const HEIGHT = 360;
const FEW = 40; // points of a run that are drawn as dots as well
const PADDING = 16, LINE = 20;
const TOKENS = [[1e9, "G"], [1e6, "M"], [1e3, "k"]];
const AXES = {
  step: { title: "learner step", steps: "step", tick: (x) => fixed(x), hover: (x) => `step ${fixed(x)}` },
  wall_s: { title: "time since the start", steps: "time", tick: clock, hover: (x) => `at ${clock(x)}` },
  trained_tokens: { title: "trained tokens", steps: "any", tick: tokens, hover: (x) => `${fixed(x)} tokens` },
};

function tokens(count) {
  const [size, unit] = TOKENS.find(([least]) => count >= least) ?? [1, ""];
  return `${figure(count / size)}${unit}`;
}

export class Overlay {
  constructor(host) {
    this.chart = new Chart(host, { title: "", unit: "", axis: AXES.step, height: HEIGHT, near: true });
  }

  /** Draw {metric, axis, log, x, runs: [{name, columns, color, dashed}]}; return how many values a logarithm leaves out. */
  show({ metric, axis, log, x, runs }) {
    let hidden = 0;
    const drawable = (values) => (log ? values.map((value) => (value > 0 ? value : null)) : values);
    const known = (values) => values.filter((value) => value !== null).length;
    const series = runs.flatMap(({ name, columns, color: own, dashed }) => {
      const all = columns.map(drawable);
      hidden += known(columns.at(-1)) - known(all.at(-1));
      return all.map((values, i) => ({ name, values, color: own, dashed, quiet: i < all.length - 1, dots: i === 0 && known(values) <= FEW }));
    });
    this.chart.name(metric, AXES[axis], log);
    this.chart.update(x, series);
    return hidden;
  }

  /** Hand a picture of the chart, with its title and the names of the runs, to a function. */
  picture(take) {
    const plot = this.chart.drawn?.ctx.canvas;
    if (!plot) return;
    const scale = devicePixelRatio, named = this.chart.series.filter((one) => !one.quiet);
    const canvas = document.createElement("canvas");
    canvas.width = plot.width + 2 * PADDING * scale;
    canvas.height = plot.height + (2 * PADDING + LINE * (named.length + 1)) * scale;
    const to = canvas.getContext("2d");
    to.fillStyle = color("--card");
    to.fillRect(0, 0, canvas.width, canvas.height);
    to.scale(scale, scale);
    to.textBaseline = "middle";
    to.font = "600 14px system-ui, sans-serif";
    to.fillStyle = color("--ink");
    to.fillText(this.chart.title, PADDING, PADDING + LINE / 2);
    to.font = "12px system-ui, sans-serif";
    named.forEach((one, i) => {
      const y = PADDING + LINE * (i + 1.5);
      to.fillStyle = color(one.color);
      to.fillRect(PADDING, y - 5, 10, 10);
      to.fillStyle = color("--ink");
      to.fillText(one.name, PADDING + 18, y);
    });
    to.drawImage(plot, PADDING, PADDING + LINE * (named.length + 1), plot.width / scale, plot.height / scale);
    canvas.toBlob(take, "image/png");
  }
}
