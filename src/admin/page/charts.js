// Charts of the history of a pool: a line for each series, and the values of the time under the pointer or the keys.

import { attribute, el, svg, text } from "./dom.js";
import { KEPT } from "./data.js";
import { NONE, figure, ms, percent, span, time } from "./format.js";

const WIDTH = 240, HEIGHT = 56, PAD = 3;
/** A chart is at least this many samples wide, so that the first minutes are not a dot at its end. */
const LEAST = 24;
/** Samples in which the latest known value is looked for: an idle pool has no percentiles. */
const RECENT = 12;

/** The charts of each pool: title, `[column, name]` of each line, format, and the least top of the axis. */
const CHARTS = [
  { title: "Requests", unit: "/s", series: [["requests", "requests"]], format: figure, least: 1 },
  { title: "Time to first byte", series: [["ttft_p50", "p50"], ["ttft_p95", "p95"], ["ttft_p99", "p99"]], format: ms, least: 10 },
  { title: "End to end", series: [["duration_p50", "p50"], ["duration_p95", "p95"]], format: ms, least: 10 },
  { title: "Load", series: [["in_flight", "in flight"], ["queued", "queued"]], format: figure, least: 4 },
  { title: "Failures", unit: "/s", series: [["errors", "5xx"], ["rejections", "rejected"]], format: figure, least: 0.1, tone: "failures" },
  { title: "Cache hit ratio", series: [["hit_ratio", "of prompt tokens"]], format: percent, least: 1, most: 1 },
];

/** The least of 1, 2, 5, 10, 20, … that is not below `value`. */
function top(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map(step => step * power).find(step => step >= value * 0.999);
}

/** The path of a line with gaps where nothing is known. */
function path(values, slots, highest) {
  const left = slots - values.length;
  const x = i => PAD + (left + i) * (WIDTH - 2 * PAD) / Math.max(1, slots - 1);
  const y = value => HEIGHT - PAD - value / highest * (HEIGHT - 2 * PAD);
  let drawn = "", open = false;
  values.forEach((value, i) => {
    if (value == null) {
      open = false;
      return;
    }
    const point = `${x(i).toFixed(1)} ${y(Math.min(value, highest)).toFixed(1)}`;
    // A lone sample is a dot: a line without length with round ends.
    drawn += open ? `L${point}` : `M${point}l0 0`;
    open = true;
  });
  return drawn;
}

const latest = values => values.slice(-RECENT).findLast(value => value != null) ?? null;

function chart({ title, unit = "", series, format, least, most, tone }) {
  const lines = series.map((_, i) => svg("path", { class: `line s${i}` }));
  const cross = svg("line", { class: "cross", y1: 0, y2: HEIGHT });
  const drawing = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" }, ...lines, cross);
  const highestLabel = el("span", { class: "axis high", "aria-hidden": "true" });
  const startLabel = el("span", { class: "axis start", "aria-hidden": "true" });
  const endLabel = el("span", { class: "axis end", "aria-hidden": "true" }, "now");
  const when = el("span", { class: "when soft" });
  const figures = series.map(([, name], i) => {
    const value = el("b");
    return { value, node: el("span", { class: `figure s${i}` }, value, el("small", {}, name)) };
  });
  const plot = el("div", { class: "plot", tabindex: 0, role: "slider", "aria-label": `${title}, history`, "aria-valuemin": 0 },
    drawing, highestLabel, startLabel, endLabel);
  const node = el("div", { class: `tile ${tone ?? ""}` },
    el("div", { class: "tile-head" }, el("h3", {}, title), when), el("div", { class: "figures" }, ...figures.map(one => one.node)), plot);
  let shown = null, point = null;

  function showValues() {
    if (!shown) return;
    const { columns, slots, length, step, read } = shown;
    const at = point == null ? null : Math.max(0, length - 1 - point);
    const values = columns.map(values => at == null ? latest(values) : values[at] ?? null);
    figures.forEach(({ value }, i) => text(value, values[i] == null ? NONE : format(values[i]) + unit));
    const moment = at == null ? "" : time(new Date(read - (length - 1 - at) * step * 1_000));
    text(when, moment);
    const x = PAD + (slots - 1 - (point ?? 0)) * (WIDTH - 2 * PAD) / Math.max(1, slots - 1);
    attribute(cross, "x1", x);
    attribute(cross, "x2", x);
    attribute(node, "data-point", at == null ? null : "on");
    attribute(plot, "aria-valuemax", Math.max(0, length - 1));
    attribute(plot, "aria-valuenow", at ?? Math.max(0, length - 1));
    const spoken = series.map(([, name], i) => `${name} ${values[i] == null ? "unknown" : format(values[i]) + unit}`);
    attribute(plot, "aria-valuetext", `${moment || "now"}: ${spoken.join(", ")}`);
  }
  function select(ago) {
    point = ago == null || !shown?.length ? null : Math.min(shown.length - 1, Math.max(0, ago));
    showValues();
  }
  plot.addEventListener("pointermove", event => {
    if (!shown) return;
    const box = plot.getBoundingClientRect();
    select(Math.round((1 - (event.clientX - box.left) / box.width) * (shown.slots - 1)));
  });
  plot.addEventListener("pointerleave", () => select(null));
  plot.addEventListener("blur", () => select(null));
  plot.addEventListener("keydown", event => {
    const step = { ArrowLeft: 1, ArrowRight: -1, PageUp: 12, PageDown: -12 }[event.key];
    if (step) select((point ?? 0) + step);
    else if (event.key === "Home") select(KEPT);
    else if (event.key === "End") select(0);
    else if (event.key === "Escape") select(null);
    else return;
    event.preventDefault();
  });

  return {
    node,
    update(history, name) {
      const known = history?.pools[name];
      if (!known) return;
      const columns = series.map(([column]) => known[column]);
      const length = columns[0].length;
      const slots = Math.max(LEAST, length);
      const highest = most ?? top(Math.max(least, ...columns.flat().filter(value => value != null)));
      columns.forEach((values, i) => attribute(lines[i], "d", path(values, slots, highest)));
      text(highestLabel, format(highest) + unit);
      text(startLabel, `${span((slots - 1) * history.step_seconds + 1)} ago`);
      shown = { columns, slots, length, step: history.step_seconds, read: history.read };
      showValues();
    },
  };
}

/** The charts of one pool. */
export function charts(name) {
  const all = CHARTS.map(chart);
  const node = el("div", { class: "tiles", role: "group", "aria-label": `History of pool ${name}` }, ...all.map(one => one.node));
  let drawn = null;
  return {
    node,
    update(history) {
      // The history changes less often than the rest.
      if (history === drawn) return;
      drawn = history;
      all.forEach(one => one.update(history, name));
    },
  };
}
