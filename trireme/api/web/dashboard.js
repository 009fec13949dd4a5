// The live dashboard: reads /load once a second and shows the server's current numbers and their history.

import { byId, element } from "./dom.js";
import { getJson } from "./api.js";
import { Chart } from "./charts.js";

const SECONDS = 300;
const SELDOM = 5000; // milliseconds between requests while the dashboard is hidden
const points = [];
let before = null;
let timer = null;
let tick = null;

const whole = (value) => (value >= 10000 ? `${(value / 1000).toFixed(value >= 100000 ? 0 : 1)}k` : value >= 100 || Number.isInteger(value) ? Math.round(value).toLocaleString() : value.toFixed(1));
const percent = (value) => `${value.toFixed(value > 0 && value < 9.95 ? 1 : 0)}%`;
const time = (seconds) => (seconds === 0 ? "0" : seconds >= 10 ? `${seconds.toFixed(0)} s` : seconds >= 1 ? `${seconds.toFixed(1)} s` : `${(seconds * 1000).toFixed(seconds < 0.0995 ? 1 : 0)} ms`);
const span = (seconds) => {
  const parts = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]].filter(([size]) => seconds >= size);
  return parts.slice(0, 2).map(([size, name], at) => `${Math.floor((at ? seconds % parts[0][0] : seconds) / size)} ${name}`).join(" ") || "0 s";
};

const CARDS = [
  ["throughput", "Tokens per second", "generated, all requests together"],
  ["running", "Running", "requests in the batch"],
  ["first", "Time to first token", "p50 · p99, last minute"],
  ["between", "Between tokens", "p50 · p99, last minute"],
  ["memory", "KV memory", "in use by running requests"],
  ["prefix", "Prefix cache", "prompt tokens that were found"],
];
const cards = {};

const CHARTS = [
  ["Tokens per second", [["generated", "--blue", true], ["computed", "--bronze", false]], whole, { least: 10 }, (s) => [s.generated, s.computed]],
  ["Requests", [["running", "--blue", true], ["waiting", "--red", true]], whole, { least: 4 }, (s) => [s.running, s.waiting]],
  ["Time to first token", [["p50", "--blue", false], ["p90", "--violet", false], ["p99", "--red", false]], time, { least: 0.1 }, (s) => s.first],
  ["Between tokens", [["p50", "--blue", false], ["p90", "--violet", false], ["p99", "--red", false]], time, { least: 0.02 }, (s) => s.between],
  ["KV memory", [["in use", "--blue", true], ["with cache", "--bronze", false]], percent, { top: 100 }, (s) => [s.memory, s.held]],
  ["Batch size", [["tokens per step", "--green", true]], whole, { least: 4 }, (s) => [s.batch]],
];
let charts = [];

export function buildDashboard() {
  for (const [id, title, what] of CARDS) {
    const value = element("b", {}, "–");
    const note = element("small", { class: "faint" }, what);
    cards[id] = { value, note };
    byId("cards").append(element("div", { class: "card" }, element("span", {}, title), value, note));
  }
  charts = CHARTS.map(([title, series, format, options, pick]) => {
    const named = series.map(([name, colour, fill]) => ({ name, colour, fill }));
    return { chart: new Chart(title, named, format, { seconds: SECONDS, ...options }), pick };
  });
  byId("charts").append(...charts.map(({ chart }) => chart.node));
}

export function watchLoad(onFailure) {
  if (tick !== null) return;
  tick = async () => {
    clearTimeout(timer);
    if (document.visibilityState === "visible") {
      try {
        take(await getJson("load"));
      } catch (error) {
        onFailure(error);
      }
    }
    timer = setTimeout(tick, byId("dashboard").hidden ? SELDOM : 1000);
  };
  tick();
}

function take(load) {
  const stats = load.stats || {};
  const now = performance.now() / 1000;
  const passed = before ? now - before.time : 0;
  const grew = (name) => (before && stats[name] >= before.stats[name] ? stats[name] - before.stats[name] : 0);
  const steps = grew("steps");
  const total = stats.pages_total || 0;
  const sample = {
    time: now,
    generated: passed ? grew("tokens_generated") / passed : null,
    computed: passed ? grew("tokens_scheduled") / passed : null,
    running: stats.running ?? load.running ?? 0,
    waiting: stats.waiting ?? load.waiting ?? 0,
    first: quantiles(load.percentiles?.time_to_first_token),
    between: quantiles(load.percentiles?.inter_token_latency),
    memory: 100 * (load.kv_usage || 0),
    held: total ? (100 * (total - (stats.pages_free || 0))) / total : null,
    batch: steps ? grew("tokens_scheduled") / steps : 0,
  };
  points.push(sample);
  while (points.length && now - points[0].time > SECONDS + 5) points.shift();
  before = { time: now, stats };
  show(load, stats, sample);
}

function quantiles(found) {
  return found ? [found.p50, found.p90, found.p99] : [null, null, null];
}

function show(load, stats, sample) {
  cards.throughput.value.textContent = sample.generated === null ? "–" : whole(sample.generated);
  cards.throughput.note.textContent = `${whole(stats.tokens_generated || 0)} generated in ${span(stats.uptime || 0)}`;
  cards.running.value.textContent = String(sample.running);
  cards.running.note.textContent = `${sample.waiting} waiting · ${load.totals?.requests ?? 0} since the start`;
  cards.first.value.textContent = pair(sample.first);
  cards.between.value.textContent = pair(sample.between);
  cards.memory.value.textContent = percent(sample.memory);
  cards.memory.note.textContent = `${stats.pages_free ?? 0} of ${stats.pages_total ?? 0} pages free · ${stats.preemptions ?? 0} pauses`;
  const asked = stats.cache_queries || 0;
  cards.prefix.value.textContent = asked ? percent((100 * (stats.cache_hits || 0)) / asked) : "–";
  cards.prefix.note.textContent = `${whole(stats.cache_hits || 0)} of ${whole(asked)} prompt tokens found`;
  if (byId("dashboard").hidden) return;
  for (const { chart, pick } of charts) chart.update(points.map((point) => ({ time: point.time, values: pick(point) })));
}

function pair([median, , worst]) {
  if (median === null) return "–";
  const [least, most] = [time(median), time(worst)];
  return least.endsWith(" ms") === most.endsWith(" ms") ? `${least.replace(/ m?s$/, "")} · ${most}` : `${least} · ${most}`;
}

export function redrawDashboard() {
  if (tick !== null && !byId("dashboard").hidden) {
    clearTimeout(timer);
    timer = setTimeout(tick, points.length && performance.now() / 1000 - points.at(-1).time < 1 ? 500 : 0);
  }
  for (const { chart, pick } of charts) chart.update(points.map((point) => ({ time: point.time, values: pick(point) })));
}
