// Line charts on a canvas: several series over the last minutes. They show the values under the pointer.

import { element } from "./dom.js";

const PADDING = { left: 54, right: 10, top: 10, bottom: 20 };

export class Chart {
  // series: [{ name, colour: a CSS variable, fill: whether the area below is tinted }]
  constructor(title, series, format, options = {}) {
    this.series = series;
    this.format = format;
    this.options = options;
    this.points = [];
    this.pointer = null;
    this.canvas = element("canvas", { role: "img", "aria-label": title });
    this.legend = element("div", { class: "legend" });
    this.values = series.map((one) => {
      const value = element("b", {}, "–");
      const dot = element("i");
      dot.style.background = `var(${one.colour})`;
      this.legend.append(element("span", {}, dot, one.name, value));
      return value;
    });
    this.node = element("figure", { class: "chart" }, element("figcaption", {}, element("span", {}, title), this.legend), this.canvas);
    this.canvas.addEventListener("pointermove", (event) => this.point(event.offsetX));
    this.canvas.addEventListener("pointerleave", () => this.point(null));
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  update(points) {
    this.points = points;
    this.draw();
  }

  point(x) {
    this.pointer = x;
    this.draw();
  }

  draw() {
    const { clientWidth: width, clientHeight: height } = this.canvas;
    if (!width || !height) return;
    const ratio = window.devicePixelRatio || 1;
    if (this.canvas.width !== Math.round(width * ratio) || this.canvas.height !== Math.round(height * ratio)) {
      this.canvas.width = Math.round(width * ratio);
      this.canvas.height = Math.round(height * ratio);
    }
    const context = this.canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    const style = getComputedStyle(document.documentElement);
    const area = { width: width - PADDING.left - PADDING.right, height: height - PADDING.top - PADDING.bottom };
    const top = this.top();
    const now = this.points.length ? this.points[this.points.length - 1].time : 0;
    const span = Math.min(this.options.seconds, Math.max(60, Math.ceil((now - (this.points[0]?.time ?? now)) / 60) * 60));
    const x = (time) => PADDING.left + area.width * (1 - (now - time) / span);
    const y = (value) => PADDING.top + area.height * (1 - Math.min(value, top) / top);
    this.grid(context, style, area, top, span);
    this.series.forEach((one, index) => this.line(context, style, one, index, x, y, area));
    this.told(context, style, x, y, area);
  }

  top() {
    if (this.options.top) return this.options.top;
    const highest = Math.max(0, ...this.points.flatMap((point) => point.values.filter((value) => value !== null)));
    const least = this.options.least || 1;
    if (highest <= least) return least;
    const power = 10 ** Math.floor(Math.log10(highest));
    return [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((value) => value >= highest);
  }

  grid(context, style, area, top, span) {
    context.font = "11px system-ui, sans-serif";
    context.fillStyle = style.getPropertyValue("--faint");
    context.strokeStyle = style.getPropertyValue("--line");
    context.lineWidth = 1;
    for (let step = 0; step <= 2; step += 1) {
      const y = Math.round(PADDING.top + (area.height * step) / 2) + 0.5;
      context.beginPath();
      context.moveTo(PADDING.left, y);
      context.lineTo(PADDING.left + area.width, y);
      context.stroke();
      context.textAlign = "right";
      context.textBaseline = "middle";
      context.fillText(this.format(top * (1 - step / 2)), PADDING.left - 6, y);
    }
    context.textBaseline = "alphabetic";
    const step = span > 60 ? 60 : 15;
    for (let past = 0; past < span; past += step) {
      context.textAlign = past === 0 ? "right" : "center";
      const at = PADDING.left + area.width * (1 - past / span);
      context.fillText(past === 0 ? "now" : step === 60 ? `−${past / 60} min` : `−${past} s`, at, PADDING.top + area.height + 15);
    }
  }

  line(context, style, one, index, x, y, area) {
    const colour = style.getPropertyValue(one.colour).trim();
    const runs = [];
    let run = [];
    for (const point of this.points) {
      const value = point.values[index];
      if (value === null || value === undefined) {
        if (run.length) runs.push(run);
        run = [];
      } else run.push([x(point.time), y(value)]);
    }
    if (run.length) runs.push(run);
    context.save();
    context.beginPath();
    context.rect(PADDING.left, 0, area.width + PADDING.right, PADDING.top + area.height + 1);
    context.clip();
    context.strokeStyle = colour;
    context.fillStyle = colour;
    context.lineWidth = 1.75;
    context.lineJoin = "round";
    for (const places of runs) {
      context.beginPath();
      places.forEach(([left, up], at) => (at ? context.lineTo(left, up) : context.moveTo(left, up)));
      context.stroke();
      if (one.fill && places.length > 1) {
        context.lineTo(places[places.length - 1][0], PADDING.top + area.height);
        context.lineTo(places[0][0], PADDING.top + area.height);
        context.globalAlpha = 0.13;
        context.fill();
        context.globalAlpha = 1;
      }
    }
    context.restore();
  }

  told(context, style, x, y, area) {
    let chosen = this.points[this.points.length - 1];
    if (this.pointer !== null && this.points.length) {
      chosen = this.points.reduce((best, point) => (Math.abs(x(point.time) - this.pointer) < Math.abs(x(best.time) - this.pointer) ? point : best));
      const at = Math.round(x(chosen.time)) + 0.5;
      context.strokeStyle = style.getPropertyValue("--faint");
      context.setLineDash([3, 3]);
      context.beginPath();
      context.moveTo(at, PADDING.top);
      context.lineTo(at, PADDING.top + area.height);
      context.stroke();
      context.setLineDash([]);
      chosen.values.forEach((value, index) => {
        if (value === null) return;
        context.fillStyle = style.getPropertyValue(this.series[index].colour);
        context.beginPath();
        context.arc(at, y(value), 3.2, 0, 7);
        context.fill();
      });
    }
    this.values.forEach((node, index) => {
      const value = chosen?.values[index];
      node.textContent = value === null || value === undefined ? "–" : this.format(value);
    });
  }
}
