"""The page of a report: its frame, its look and the script that draws it.

It is Python text because Flower ships no HTML with an app, and the server writes the report of its run. The script
makes every text of other people a text node or an attribute, and never HTML; `report.page` puts in the @NAMES@.
"""

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="@POLICY@">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="generator" content="kindred">
<title>@TITLE@</title>
<style>@STYLE@</style>
</head>
<body>
<noscript><p class="note">The figures of this report are drawn by a script that is a part of the page;
the browser has been told to run none.</p></noscript>
<main id="main"></main>
<script type="application/json" id="data" data-poll="@POLL@">@DATA@</script>
<script>@SCRIPT@</script>
</body>
</html>
"""

# Lines are of Okabe and Ito's colours, as in pictures.py; on a dark page the darkest are lighter.
STYLE = """
:root {
  --paper: #ffffff; --card: #f6f7f9; --ink: #1c2126; --soft: #59636e; --rule: #d9dee3; --grid: #e6e9ec; --note: #fff4d6;
  --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #cc79a7; --c4: #b87f00; --c5: #3a9bd6; --c6: #1c2126;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #15191d; --card: #1e2429; --ink: #e8ebee; --soft: #a3adb7; --rule: #39424a; --grid: #2b3238;
    --note: #3b3314;
    --c0: #4aa8e0; --c1: #f08a3c; --c2: #2fc495; --c3: #e29ac3; --c4: #e6ac2e; --c5: #8fcbf0; --c6: #e8ebee;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--paper); color: var(--ink); overflow-wrap: anywhere;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0; }
h2 { font-size: 1.15rem; margin: 2.75rem 0 0.75rem; padding-top: 0.75rem; border-top: 1px solid var(--rule); }
p { margin: 0.35rem 0; max-width: 46rem; }
section > p { margin-bottom: 1rem; }
.soft, figcaption { color: var(--soft); }
.note { background: var(--note); border-radius: 6px; padding: 0.5rem 0.75rem; }
dl.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(8.5rem, 1fr)); gap: 0.6rem;
  margin: 1.25rem 0 0; }
dl.figures div { background: var(--card); border-radius: 8px; padding: 0.55rem 0.75rem; }
dl.figures dt { color: var(--soft); font-size: 0.82rem; line-height: 1.3; }
dl.figures dd { margin: 0; font-size: 1.25rem; font-variant-numeric: tabular-nums; }
.pair { display: grid; grid-template-columns: minmax(0, 1fr); gap: 1.75rem; }
@media (min-width: 800px) { .pair { grid-template-columns: repeat(2, minmax(0, 1fr)); } }
figure { margin: 0; min-width: 0; }
figcaption { font-size: 0.86rem; line-height: 1.4; margin-top: 0.35rem; }
h3 { font-size: 0.95rem; margin: 0 0 0.35rem; }
svg { display: block; max-width: 100%; height: auto; }
svg text { fill: var(--ink); font-size: 12px; }
svg text.small { font-size: 10.5px; }
svg text.soft { fill: var(--soft); }
.legend { display: flex; flex-wrap: wrap; gap: 0.1rem 1rem; list-style: none; margin: 0.3rem 0 0; padding: 0;
  font-size: 0.86rem; }
.legend li { display: flex; align-items: center; gap: 0.4rem; }
.legend svg { flex: none; }
.controls { display: flex; flex-wrap: wrap; gap: 0.5rem 2rem; align-items: center; margin: 0.5rem 0 1.25rem;
  position: sticky; top: 0; background: var(--paper); padding: 0.5rem 0; z-index: 1;
  border-bottom: 1px solid var(--rule); }
.controls label { display: flex; align-items: center; gap: 0.6rem; max-width: 100%; white-space: nowrap; }
.controls output { font-variant-numeric: tabular-nums; font-weight: 600; }
input[type=range] { width: 20rem; min-width: 4rem; flex: 0 1 auto; accent-color: var(--c0); min-height: 1.75rem; }
input[type=range].short { width: 7rem; }
:focus-visible { outline: 3px solid var(--c0); outline-offset: 2px; border-radius: 3px; }
ul.remarks { font-size: 0.9rem; color: var(--soft); padding-left: 1.1rem; max-width: 52rem; }
.scroll { overflow: auto; max-height: 26rem; margin: 0.5rem 0; }
table { border-collapse: collapse; font-size: 0.86rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: 0.25rem 0.75rem 0.25rem 0; overflow-wrap: normal;
  border-bottom: 1px solid var(--rule); }
td.long { overflow-wrap: anywhere; min-width: 12rem; max-width: 34rem; }
th { color: var(--soft); font-weight: 600; }
tbody th { color: var(--ink); max-width: 16rem; }
th.number, td.number { text-align: right; }
td.number { white-space: nowrap; }
caption { text-align: left; color: var(--soft); padding-bottom: 0.25rem; }
details { margin: 0.75rem 0; }
summary { cursor: pointer; color: var(--soft); font-size: 0.9rem; padding: 0.2rem 0; }
pre { background: var(--card); border-radius: 8px; padding: 0.75rem; margin: 0.5rem 0; white-space: pre-wrap;
  font-size: 0.86rem;
  font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
img { max-width: 100%; max-height: 36rem; height: auto; width: auto;
  background: #ffffff; border-radius: 8px; display: block; }
a { color: var(--c0); }
@page { margin: 1.4cm; }
@media print {
  :root { --paper: #ffffff; --card: #f6f7f9; --ink: #000000; --soft: #444444; --rule: #cccccc; --grid: #e6e9ec;
    --note: #fff4d6;
    --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #cc79a7; --c4: #b87f00; --c5: #3a9bd6; --c6: #000000; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  body { font-size: 11pt; }
  main { padding: 0; max-width: none; }
  .pair { grid-template-columns: repeat(2, minmax(0, 1fr)); }
  figure, tr, dl.figures div { break-inside: avoid; }
  h2, h3, section > p, .controls { break-after: avoid; }
  .scroll { max-height: none; overflow: visible; }
  table { font-size: 7.5pt; }
  th, td { padding-right: 0.4rem; }
  .controls { position: static; border: 0; }
  .controls input, .controls .short-control { display: none; }
  img { max-height: 20cm; }
}
"""

SCRIPT = r"""
(() => {
"use strict";
const COLOURS = 7, DASHES = ["", "7 4", "8 3 2 3", "2 3", "10 2 2 2 2 2"], SHAPES = 6;
const VIRIDIS = ["440154", "48186a", "472d7b", "424086", "3b528b", "33638d", "2c728e", "26828e", "21918c", "1fa088",
  "28ae80", "3fbc73", "5ec962", "84d44b", "addc30", "d8e219", "fde725"].map(text =>
  [0, 2, 4].map(at => parseInt(text.slice(at, at + 2), 16)));
const OWN = [176, 176, 176, 255];
const kept = { round: null, edges: 2 };  // what the reader has chosen; no round is the last one
const plots = [];  // { box, draw }: boxes that are drawn as wide as they are
const PRINTED = 330;  // pixels: how wide a column is on paper

// --- Elements: texts are always text nodes, never HTML ---

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {}))
    if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  node.append(...children.flat(Infinity).filter(child => child !== null && child !== undefined && child !== false));
  return node;
}
const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const s = (tag, attributes, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
const colour = i => `var(--c${i % COLOURS})`;
const known = value => value !== null && value !== undefined;

// --- Numbers as text ---

const percent = (value, digits = 1) => known(value) ? `${(100 * value).toFixed(digits)} %` : "–";
const digits = value => value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2);
function unit(most, base) {
  const steps = base === "B" ? [["GB", 1e9], ["MB", 1e6], ["kB", 1e3], ["B", 1]]
    : [["million", 1e6], ["thousand", 1e3], ["", 1]];
  return steps.find(step => most >= step[1]) || steps[steps.length - 1];
}
function amount(value, base) {
  if (!known(value)) return "–";
  if (base !== "B") return Math.round(value).toLocaleString("en");
  const [name, size] = unit(value, base);
  return `${size === 1 ? Math.round(value) : digits(value / size)} ${name}`;
}
const time = seconds => seconds < 90 ? `${digits(seconds)} s`
  : seconds < 5400 ? `${digits(seconds / 60)} min` : `${digits(seconds / 3600)} h`;
const short = (text, longest = 14) => text.length > longest ? text.slice(0, longest - 1) + "…" : text;
const plural = (number, word, several = word + "s") => `${number} ${number === 1 ? word : several}`;

function ticks(low, high, most, whole) {
  const raw = (high - low) / Math.max(1, most), power = 10 ** Math.floor(Math.log10(raw || 1));
  let step = [1, 2, 5, 10].map(factor => factor * power).find(size => size >= raw * 0.999) || 1;
  if (whole) step = Math.max(1, Math.round(step));
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i * step);
  return [found, step];
}
const tickText = (value, step) => value.toFixed(Math.max(0, Math.ceil(-Math.log10(step) - 1e-9)));

// --- Plots ---

function plot(draw) {
  const box = h("div", { class: "plot" });
  plots.push({ box, draw });
  return box;
}
function drawPlots(most = Infinity) {
  for (const { box, draw } of plots) {
    const width = Math.min(most, Math.floor(box.clientWidth));
    if (width) box.replaceChildren(draw(width));
  }
}
const drawing = (width, height, label, ...children) => s("svg", {
  viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label }, ...children);

function mark(shape, x, y, size, paint, title) {
  const r = size, attributes = { fill: paint, stroke: "var(--paper)", "stroke-width": 0.8 };
  const path = [
    `M${-r} 0A${r} ${r} 0 1 0 ${r} 0A${r} ${r} 0 1 0 ${-r} 0Z`,
    `M${-r} ${-r}H${r}V${r}H${-r}Z`,
    `M0 ${-1.2 * r}L${1.2 * r} ${r}H${-1.2 * r}Z`,
    `M0 ${-1.4 * r}L${1.4 * r} 0L0 ${1.4 * r}L${-1.4 * r} 0Z`,
    `M0 ${1.2 * r}L${1.2 * r} ${-r}H${-1.2 * r}Z`,
    `M${-r} ${-r / 3}H${-r / 3}V${-r}H${r / 3}V${-r / 3}H${r}V${r / 3}H${r / 3}V${r}H${-r / 3}V${r / 3}H${-r}Z`,
  ][shape % SHAPES];
  return s("path", { d: path, transform: `translate(${x.toFixed(1)} ${y.toFixed(1)})`, ...attributes },
    title && s("title", {}, title));
}

// A frame with axes from and to the values `across` and `upward`, in which `inside(x, y)` draws: functions from values
// to places.
function framed(width, { across, upward, xName, yName, whole, label, inside, square }) {
  const left = 42, right = 14, top = 26, bottom = 44;
  const height = square ? Math.min(width, 420) : Math.round(Math.max(230, Math.min(340, width * 0.62)));
  if (square) width = height;
  const [from, to] = across, [low, high] = upward;
  const x = value => left + (width - left - right) * (value - from) / (to - from || 1);
  const y = value => height - bottom - (height - top - bottom) * (value - low) / (high - low || 1);
  const [xTicks, xStep] = ticks(from, to, (width - left) / 62, whole);
  const [yTicks, yStep] = ticks(low, high, (height - top - bottom) / 34);
  return drawing(width, height, label,
    yTicks.map(value => [
      s("line", { x1: left, x2: width - right, y1: y(value), y2: y(value), stroke: "var(--grid)" }),
      s("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end", class: "soft" }, tickText(value, yStep))]),
    xTicks.map(value => [
      s("line", { x1: x(value), x2: x(value), y1: height - bottom, y2: height - bottom + 4, stroke: "var(--soft)" }),
      s("text", { x: x(value), y: height - bottom + 18, "text-anchor": "middle", class: "soft" },
        tickText(value, xStep))]),
    s("line", { x1: left, x2: width - right, y1: height - bottom, y2: height - bottom, stroke: "var(--soft)" }),
    s("text", { x: 2, y: 13 }, yName),
    s("text", { x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle" }, xName),
    inside(x, y, width, height));
}

// Limits for accuracies in percent, with some air.
function limits(values) {
  const step = 5, low = Math.min(...values), high = Math.max(...values);
  return [Math.max(0, Math.floor((low - 1) / step) * step), Math.min(100, Math.ceil((high + 1) / step) * step)];
}

// lines: { name, x, y, low, high, i, dash, plain }, y in [0, 1] with nulls.
function lineFigure({ title, lines, xName, whole, says, caption, bandName }) {
  lines = lines.filter(line => line.y.some(known));
  const all = lines.flatMap(line => [line.y, line.low || [], line.high || []].flat()).filter(known).map(v => 100 * v);
  if (!all.length) return figure(title, h("p", { class: "soft" }, "No client has reported an accuracy yet."));
  const xs = lines.flatMap(line => line.x.filter((_, at) => known(line.y[at])));
  const upward = limits(all.map(v => Math.max(0, Math.min(100, v))));
  const [least, most] = [Math.min(...xs), Math.max(...xs)];
  const across = whole ? [least - 0.5, most + 0.5] : [Math.min(0, least), 1.03 * most || 1];
  const path = pairs => pairs.map(([px, py], at) => `${at ? "L" : "M"}${px.toFixed(1)} ${py.toFixed(1)}`).join("");
  const label = `${title}. ${says || lines.map(describe).join(" ")}`;
  return figure(title, plot(width => framed(width,
    { across, upward, xName, yName: "accuracy (%)", whole, label, inside: (x, y) => [
    lines.map(line => {
      if (!line.low) return null;
      const at = line.x.map((_, i) => i).filter(i => known(line.low[i]) && known(line.high[i]));
      const edge = (side, order) => order.map(i =>
        [x(line.x[i]), y(Math.max(upward[0], Math.min(upward[1], 100 * side[i])))]);
      if (at.length === 1)
        return s("line", { x1: x(line.x[at[0]]), x2: x(line.x[at[0]]), y1: y(100 * line.low[at[0]]),
          y2: y(100 * line.high[at[0]]),
          stroke: colour(line.i), "stroke-width": 12, "stroke-opacity": 0.2 });
      return s("path", { d: path([...edge(line.low, at), ...edge(line.high, [...at].reverse())]) + "Z",
        fill: colour(line.i),
        "fill-opacity": 0.16 });
    }),
    lines.map(line => {
      const at = line.x.map((_, i) => i).filter(i => known(line.y[i]));
      const every = Math.max(1, Math.ceil(at.length / 20));
      return [
        s("path", { d: path(at.map(i => [x(line.x[i]), y(100 * line.y[i])])), fill: "none", stroke: colour(line.i),
          "stroke-width": 2.2, "stroke-dasharray": DASHES[line.dash ?? 0] || null, "stroke-linejoin": "round" }),
        at.filter((_, n) => n % every === 0 || n === at.length - 1).map(i =>
          mark(line.dash ?? 0, x(line.x[i]), y(100 * line.y[i]), 3.6, colour(line.i),
            `${line.name}, ${line.titles ? line.titles[i] : xName + " " + line.x[i]}: ${percent(line.y[i])}`)),
      ];
    }),
  ] })), legend(lines, bandName), caption && h("figcaption", {}, caption));
}
function describe(line) {
  const at = line.y.map((_, i) => i).filter(i => known(line.y[i]));
  const [first, last] = [at[0], at[at.length - 1]];
  const best = at.reduce((a, b) => line.y[b] > line.y[a] ? b : a, first);
  return `${line.name}: ${percent(line.y[first])} at first, ${percent(line.y[last])} at last, ` +
    `${percent(line.y[best])} at best.`;
}
function legend(lines, bandName) {
  if (lines.length < 2 && !bandName) return null;
  return h("ul", { class: "legend" },
    lines.map(line => h("li", {}, s("svg", { width: 34, height: 12, "aria-hidden": "true" },
      s("line", { x1: 0, x2: 34, y1: 6, y2: 6, stroke: colour(line.i), "stroke-width": 2.2,
        "stroke-dasharray": DASHES[line.dash ?? 0] || null }),
      mark(line.dash ?? 0, 17, 6, 3.6, colour(line.i))), line.name)),
    bandName && h("li", {}, s("svg", { width: 20, height: 12, "aria-hidden": "true" },
      s("rect", { width: 20, height: 12, fill: lines.length === 1 ? colour(lines[0].i) : "var(--soft)",
        "fill-opacity": 0.2 })), bandName));
}
// What rounds besides those of training are; pairs: the rounds of a curve, and how many were asked for.
function besides(pairs) {
  const told = [
    pairs.some(([rounds]) => rounds.includes(0)) && "Round 0 is what came before training.",
    pairs.some(([rounds, asked]) => rounds.some(number => number > asked))
      && "A round beyond those of training is a closing evaluation, of the models that the last one left."];
  return told.filter(Boolean).join(" ") || null;
}
const figure = (title, ...children) => h("figure", {}, title && h("h3", {}, title), ...children);
const section = (title, ...children) => h("section", {}, h("h2", {}, title), ...children);

// `numbers` and `long` say which columns hold numbers, and texts of any length.
function table(columns, rows, { caption, numbers = [], long = [] }) {
  const kind = i => numbers.includes(i) ? "number" : long.includes(i) ? "long" : null;
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
    h("table", {}, h("caption", {}, caption),
      h("thead", {}, h("tr", {}, columns.map((name, i) => h("th", { scope: "col", class: kind(i) }, name)))),
      h("tbody", {}, rows.map(row => h("tr", {}, row.map((cell, i) =>
        i === 0 ? h("th", { scope: "row", class: kind(i) }, cell) : h("td", { class: kind(i) }, cell)))))));
}
const more = (title, ...children) => h("details", { id: "more-" + title.toLowerCase().replace(/[^a-z]+/g, "-") },
  h("summary", {}, title), ...children);
const figures = pairs => h("dl", { class: "figures" }, pairs.filter(Boolean).map(([name, text]) =>
  h("div", {}, h("dt", {}, name), h("dd", {}, text))));

// --- A run ---

function run(data) {
  const { curve, figures: sum, clients } = data;
  const rounds = curve.rounds.filter(number => number >= 1 && number <= data.asked).length;
  const bytes = unit(Math.max(0, ...curve.bytes), "B");
  const samples = curve.samples && unit(Math.max(0, ...curve.samples), "");
  const inRounds = curve.rounds.map(number => `round ${number}`);
  const against = (title, x, xName) => lineFigure({ title, xName, lines: [
    { name: "mean over clients", x, y: curve.mean, low: curve.p10, high: curve.p90, i: 0, titles: inRounds }],
    bandName: "bottom to top decile of clients" });
  return [
    header(data, data.finished ? `Finished: ${plural(rounds, "round")}`
      : data.live ? `Under way: ${rounds} of ${plural(data.asked, "round")}`
      : `Not finished: ${rounds} of ${plural(data.asked, "round")}`),
    figures([
      ["mean accuracy", percent(sum.accuracy)], ["best mean", percent(sum["accuracy-best"])],
      ["bottom decile", percent(sum["accuracy-p10"])], ["mean by test size", percent(sum["accuracy-weighted"])],
      ["sent, both ways", amount(sum["bytes-down"] + sum["bytes-up"], "B")],
      known(sum["samples-trained"]) && ["samples trained", amount(sum["samples-trained"], "")],
      ["time of all rounds", time(sum.seconds)],
    ]),
    section("Accuracy",
      h("p", { class: "soft" }, "Each client's on its own test images; a client that sat out keeps its last.",
        data.stages.personal && ` What counts here: ${data.stages.personal}.`),
      h("div", { class: "pair" },
        lineFigure({ title: "Over rounds", whole: true, xName: "round", lines: [
          { name: "mean over clients", x: curve.rounds, y: curve.mean, low: curve.p10, high: curve.p90, i: 0,
            titles: inRounds }],
          bandName: "bottom to top decile of clients", caption: besides([[curve.rounds, data.asked]]) }),
        against("Against bytes", curve.bytes.map(v => v / bytes[1]), `${bytes[0]} sent, both ways`),
        samples && against("Against the clients' work", curve.samples.map(v => v / samples[1]),
          `${samples[0]} samples trained on`.trim()),
        distribution(clients)),
      more("Numbers of every round", table(
        ["round", "mean", "bottom decile", "top decile", "sent", ...(samples ? ["samples"] : [])],
        curve.rounds.map((number, i) => [String(number), percent(curve.mean[i]), percent(curve.p10[i]),
          percent(curve.p90[i]),
          amount(curve.bytes[i], "B"), ...(samples ? [amount(curve.samples[i], "")] : [])]),
        { caption: "After each round", numbers: [0, 1, 2, 3, 4, 5] }))),
    beforeAfter(data),
    data.collaboration && together(data.collaboration, data.asked),
    data.clusters && tree(data.clusters, data),
    data.partition && section("Who has which data", h("figure", {}, h("img", { src: data.partition,
      alt: "Heatmap: how many training images of each class every client has" }),
      h("figcaption", {}, "Training images of each client by class."))),
    unused(data),
    settings(data),
  ];
}

function header(data, state) {
  document.title = data.title;
  return h("header", {}, h("h1", {}, data.title),
    h("p", { class: "soft" }, data.about.join(" · ")),
    state && h("p", { id: "state", role: "status" }, h("strong", {}, state)),
    h("p", { id: "link", class: "note", hidden: true }));
}

const groupName = group => `true group ${group}`;
function groupLegend(groups) {
  const found = [...new Set(groups || [])].sort((a, b) => a - b);
  if (found.length < 2 || found.length > COLOURS) return null;
  return h("ul", { class: "legend" }, found.map((group, i) => h("li", {},
    s("svg", { width: 12, height: 12, "aria-hidden": "true" }, mark(i, 6, 6, 4.5, colour(i))), groupName(group))));
}
function groupIndex(groups) {
  const found = [...new Set(groups || [])].sort((a, b) => a - b);
  return at => groups && found.length > 1 && found.length <= COLOURS ? found.indexOf(groups[at]) : 0;
}

// Every client a block, stacked over its accuracy.
function distribution({ names, groups, accuracy }) {
  const at = accuracy.map((_, i) => i).filter(i => known(accuracy[i]));
  if (!at.length) return null;
  const index = groupIndex(groups);
  const low = Math.min(...at.map(i => accuracy[i])), high = Math.max(...at.map(i => accuracy[i]));
  const step = [0.01, 0.025].find(size => (high - low) / size <= 12) || 0.05;
  const bin = i => Math.min(Math.floor(accuracy[i] / step + 1e-9), Math.round(1 / step) - 1);
  const stacks = new Map();
  for (const i of [...at].sort((a, b) => index(a) - index(b) || accuracy[a] - accuracy[b]))
    stacks.set(bin(i), [...(stacks.get(bin(i)) || []), i]);
  const tallest = Math.max(...[...stacks.values()].map(stack => stack.length));
  const first = Math.min(...stacks.keys()), last = Math.max(...stacks.keys());
  const sorted = at.map(i => accuracy[i]).sort((a, b) => a - b), median = sorted[Math.floor(sorted.length / 2)];
  const label = `How accuracies are distributed over ${plural(at.length, "client")}: ` +
    `from ${percent(low)} to ${percent(high)}, ` +
    `half of them at ${percent(median)} or more.`;
  return figure("Distribution over clients", plot(width => framed(width, {
    across: [100 * step * (first - 0.5), 100 * step * (last + 1.5)], upward: [0, Math.max(4, tallest + 0.5)],
    xName: "accuracy (%)", yName: "clients", label,
    inside: (x, y) => [...stacks].map(([number, stack]) => stack.map((i, up) => {
      const left = x(100 * step * number) + 1, wide = x(100 * step * (number + 1)) - 1 - left, tall = y(0) - y(1);
      return s("rect", { x: left, width: Math.max(1, wide), y: y(up + 1),
        height: Math.max(0.5, tall - (tall > 4 ? 1 : 0)),
        fill: colour(index(i)) }, s("title", {}, `client ${names[i]}: ${percent(accuracy[i])}`));
    })) })), groupLegend(groups), h("figcaption", {}, "A block for each client, at its last accuracy."));
}

function beforeAfter({ curve, stages, clients }) {
  const lines = stages.curves.map((each, i) =>
    ({ name: each.name, x: curve.rounds, y: each.mean, i: [1, 0, 2, 3][i], dash: i }));
  const at = clients.names.map((_, i) => i).filter(i => known(clients.before[i]) && known(clients.after[i]));
  if (lines.length < 2 && !at.length) return null;
  const index = groupIndex(clients.groups);
  const gained = at.filter(i => clients.after[i] > clients.before[i]).length;
  const lost = at.filter(i => clients.after[i] < clients.before[i]).length;
  const values = at.flatMap(i => [100 * clients.before[i], 100 * clients.after[i]]);
  const range = at.length ? limits(values) : [0, 100];
  return section("Before and after",
    h("p", { class: "soft" }, "What a client was sent, and what it made of it on its own data."),
    h("div", { class: "pair" },
      lineFigure({ title: "Mean over clients", lines, xName: "round", whole: true }),
      at.length && figure(`Each client: ${stages["after-name"]}, against as received`, plot(width => framed(width, {
        across: range, upward: range, square: true, xName: "model as received: accuracy (%)",
        yName: `${stages["after-name"]}: accuracy (%)`,
        label: `Each client's accuracy before and after: ${gained} of ${at.length} gained, ${lost} lost.`,
        inside: (x, y) => [
          s("line", { x1: x(range[0]), y1: y(range[0]), x2: x(range[1]), y2: y(range[1]), stroke: "var(--soft)",
            "stroke-dasharray": "4 4" }),
          at.map(i => mark(index(i), x(100 * clients.before[i]), y(100 * clients.after[i]), 4.5, colour(index(i)),
            `client ${clients.names[i]}: ${percent(clients.before[i])}, then ${percent(clients.after[i])}`))] })),
        groupLegend(clients.groups),
        h("figcaption", {}, `Last reports. Above the line are gains: ${gained} of ${at.length}; ${lost} lost.`))));
}

// --- Who helps whom ---

const bytesOf = text => Uint8Array.from(atob(text), character => character.charCodeAt(0));

function together(found, asked) {
  if (!found.rounds.length)
    return section("Who helps whom", h("p", {}, found["too-many"]
      ? `The matrix of ${found["too-many"]} clients is too large for a page; it is in the folder collaboration/.`
      : `The files in collaboration/ cannot be read: ${found.damaged.join(", ")}.`));
  const count = found.names.length, last = found.rounds.length - 1;
  const strongest = Math.max(...found.strongest) || 1;
  let at = kept.round === null ? last : Math.max(0, found.rounds.findLastIndex(number => number <= kept.round));
  const decoded = new Map();
  const round = () => {  // weight(i, j): what client i got of client j, another one; own(i)
    if (!decoded.has(at)) decoded.set(at, [bytesOf(found.weights[at]), bytesOf(found.own[at])]);
    const [weights, own] = decoded.get(at);
    return { weight: (i, j) => weights[i * count + j] * found.strongest[at] / 255, own: i => own[i] / 255,
      bytes: weights };
  };
  const slider = h("input", { type: "range", id: "round", min: 0, max: last, step: 1, value: at,
    disabled: last === 0 });
  const output = h("output", { for: "round" });
  const edges = h("input", { type: "range", id: "edges", class: "short", min: 1,
    max: Math.max(1, Math.min(5, count - 1)), value: kept.edges });
  const edgesOutput = h("output", { for: "edges" });
  const matrixBox = plot(width => matrix(width, found, round(), strongest, found.rounds[at]));
  const graphBox = plot(width => graph(width, found, round(), strongest, found.rounds[at]));
  const helpers = h("div");
  const name = () => found.rounds[at] > asked ? "closing evaluation" : `round ${found.rounds[at]}`;
  function update(draw) {
    output.textContent = name();
    slider.setAttribute("aria-valuetext", name());
    edgesOutput.textContent = edges.value;
    helpers.replaceChildren(helperTable(found, round(), name()));
    if (draw) drawPlots();
  }
  slider.addEventListener("input", () => {
    at = Number(slider.value);
    kept.round = at === last ? null : found.rounds[at];
    update(true);
  });
  edges.addEventListener("input", () => { kept.edges = Number(edges.value); update(true); });
  update(false);
  const order = found.groups ? "Clients are in order of their true groups."
    : "Clients that learn from each other are side by side (hierarchical clustering of the last round).";
  const some = found.rounds.length < found.of
    ? ` ${found.rounds.length} of ${found.of} rounds are kept here; all are in the folder collaboration/.` : "";
  return section("Who helps whom",
    h("p", { class: "soft" }, `${order} Weights are rounded to one of 256 steps.${some}`,
      found.damaged.length ? ` Files that cannot be read: ${found.damaged.join(", ")}.` : ""),
    h("div", { class: "controls" },
      h("label", { for: "round" }, "Round", slider, output),
      h("label", { for: "edges", class: "short-control" }, "Helpers drawn for a client", edges, edgesOutput)),
    h("div", { class: "pair" },
      figure("Matrix", matrixBox, colourBar(strongest),
        h("figcaption", {}, "A row is a client that learns, a column one that is learnt from. ",
          "Grey: a client's own share, which is not on the scale.")),
      figure("Graph", graphBox, groupLegend(found.groups),
        h("figcaption", {}, "From the client that helps to the one that learns; the thicker, the larger the share."))),
    more("Strongest helpers of each client", helpers));
}

function viridis(share) {
  const place = Math.max(0, Math.min(1, share)) * (VIRIDIS.length - 1),
    low = Math.min(Math.floor(place), VIRIDIS.length - 2);
  return VIRIDIS[low].map((value, i) => Math.round(value + (VIRIDIS[low + 1][i] - value) * (place - low)));
}

function groupRuns(groups) {  // [group, first, end] of each run of clients of one group
  const runs = [];
  (groups || []).forEach((group, i) => {
    if (runs.length && runs[runs.length - 1][0] === group) runs[runs.length - 1][2] = i + 1;
    else runs.push([group, i, i + 1]);
  });
  return runs.length > 1 ? runs : [];
}

function matrix(width, found, { weight, own, bytes }, strongest, number) {
  const count = found.names.length, cell = Math.max(1, Math.floor(640 / count));
  const longest = Math.max(...found.names.map(name => Math.min(name.length, 10)));
  const runs = groupRuns(found.groups);
  const top = runs.length ? 34 : 10;
  let left = Math.min(80, 12 + 7 * longest), side = Math.min(width - left - 4, 520);
  const named = side / count >= 10.5;
  if (!named) { left = runs.length ? 30 : 12; side = Math.min(width - left - 4, 520); }
  const bottom = named ? Math.min(80, 12 + 7 * longest) : 10;
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = cell * count;
  const context = canvas.getContext("2d");
  const scale = found.strongest[found.rounds.indexOf(number)] / strongest / 255;
  const paints = Array.from({ length: 256 }, (_, value) => [...viridis(value * scale), 255]);
  const pixels = context.createImageData(canvas.width, canvas.height);
  for (let at = 0; at < canvas.width * canvas.height; at++) {
    const i = Math.floor(at / canvas.width / cell), j = Math.floor(at % canvas.width / cell);
    pixels.data.set(i === j ? OWN : paints[bytes[i * count + j]], 4 * at);
  }
  context.putImageData(pixels, 0, 0);
  const place = i => side * i / count;
  const size = Math.min(11, side / count);
  const strongestPair = best(count, weight);
  return drawing(left + side + 4, top + side + bottom,
    `Collaboration matrix of ${plural(count, "client")} in round ${number}. ` + (strongestPair
      ? `The largest share of another client is ${percent(weight(...strongestPair))}: ` +
        `client ${found.names[strongestPair[0]]} learns from client ${found.names[strongestPair[1]]}.`
          : "Nobody learns from another."),
    s("image", { href: canvas.toDataURL(), x: left, y: top, width: side, height: side, preserveAspectRatio: "none" }),
    runs.map(([group, from, to]) => [
      from > 0 && [["var(--ink)", 2.4], ["var(--paper)", 1.2]].map(([stroke, thick]) => [
        s("line", { x1: left, x2: left + side, y1: top + place(from), y2: top + place(from), stroke,
          "stroke-width": thick }),
        s("line", { x1: left + place(from), x2: left + place(from), y1: top, y2: top + side, stroke,
          "stroke-width": thick })]),
      s("text", { x: left + place((from + to) / 2), y: top - 5, "text-anchor": "middle", class: "soft" },
        String(group)),
      !named && s("text", { x: left - 5, y: top + place((from + to) / 2) + 4, "text-anchor": "end", class: "soft" },
        String(group))]),
    runs.length > 0 && s("text", { x: left + side / 2, y: 12, "text-anchor": "middle", class: "soft" }, "true group"),
    named && found.names.map((name, i) => {
      const x = left + place(i + 0.5), y = top + side + 6;
      return [
        s("text", { x: left - 5, y: top + place(i + 0.5) + size * 0.36, "text-anchor": "end", class: "small" },
          short(name, 10), s("title", {}, name)),
        longest <= 2 ? s("text", { x, y: y + 8, "text-anchor": "middle", class: "small" }, name)
          : s("text", { x, y, transform: `rotate(-90 ${x} ${y})`, dy: size * 0.36, "text-anchor": "end",
            class: "small" },
            short(name, 10), s("title", {}, name))];
    }));
}
function best(count, weight) {
  let found = null, most = 0;
  for (let i = 0; i < count; i++)
    for (let j = 0; j < count; j++) if (i !== j && weight(i, j) > most) { most = weight(i, j); found = [i, j]; }
  return found;
}

function colourBar(strongest) {
  return plot(width => {
    const wide = Math.min(width - 4, 360);
    return drawing(width, 34, `Colours: from dark for 0 to bright yellow for ${percent(strongest)}.`,
      s("defs", {}, s("linearGradient", { id: "viridis" }, VIRIDIS.map((paint, i) =>
        s("stop", { offset: i / (VIRIDIS.length - 1), "stop-color": `rgb(${paint})` })))),
      s("rect", { x: 2, y: 4, width: wide, height: 10, fill: "url(#viridis)" }),
      s("text", { x: 2, y: 29, class: "soft" }, "0"),
      s("text", { x: 2 + wide / 2, y: 29, "text-anchor": "middle", class: "soft" }, "share of another client"),
      s("text", { x: 2 + wide, y: 29, "text-anchor": "end", class: "soft" }, percent(strongest)));
  });
}

function strongestOf(count, weight, i, most) {
  const found = [];  // not by sorting all, which of a thousand clients takes seconds
  for (let j = 0; j < count; j++) {
    const value = j === i ? 0 : weight(i, j);
    if (value <= 0 || (found.length === most && value <= weight(i, found[most - 1]))) continue;
    let at = found.length;
    while (at > 0 && weight(i, found[at - 1]) < value) at--;
    found.splice(at, 0, j);
    if (found.length > most) found.pop();
  }
  return found;
}

function graph(width, found, { weight, own, bytes }, strongest, number) {
  const count = found.names.length, named = count <= 40;
  const side = Math.min(width, 540), middle = side / 2, radius = middle - (named ? 48 : 26);
  const index = groupIndex(found.groups);
  const place = (i, r) => {
    const angle = 2 * Math.PI * i / count - Math.PI / 2;
    return [middle + r * Math.cos(angle), middle + r * Math.sin(angle)];
  };
  const size = Math.max(2, Math.min(8, Math.PI * radius / count - 1));
  const others = bytes.filter((_, at) => at % (count + 1) !== 0);
  const same = count > 2 && others.length && others.every(value => value === others[0]);
  const edges = same ? [] : found.names.flatMap((_, i) =>
    strongestOf(count, weight, i, kept.edges).map(j => [j, i, weight(i, j)]));
  edges.sort((a, b) => a[2] - b[2]);
  const alone = same && others[0] === 0;
  const told = alone ? "nobody learns from another" : "the same share of every other client";
  const label = `Graph of round ${number}: ` + (same ? `${told}.`
    : `${plural(edges.length, "arrow")}, from the ${kept.edges} strongest helpers of each client.`);
  return drawing(side, side, label,
    s("defs", {}, Array.from({ length: COLOURS }, (_, i) => s("marker", { id: `arrow${i}`, viewBox: "0 0 8 8",
      refX: 1, refY: 4, markerWidth: 14, markerHeight: 14, markerUnits: "userSpaceOnUse", orient: "auto" },
      s("path", { d: "M0 1L8 4L0 7Z", fill: colour(i) })))),
    edges.map(([from, to, value]) => {
      const [ax, ay] = place(from, radius - size), [bx, by] = place(to, radius - size - (named ? 13 : 2));
      const bend = 0.35;
      const [cx, cy] = [middle + ((ax + bx) / 2 - middle) * bend, middle + ((ay + by) / 2 - middle) * bend];
      const share = value / strongest;
      const [start, control, end] = [[ax, ay], [cx, cy], [bx, by]].map(pair => pair.map(v => v.toFixed(1)).join(" "));
      return s("path", { d: `M${start}Q${control} ${end}`,
        fill: "none", stroke: colour(index(from)), "stroke-width": (0.5 + 3.5 * share).toFixed(2),
        "stroke-opacity": (0.25 + 0.6 * share).toFixed(2),
        "marker-end": named ? `url(#arrow${index(from) % COLOURS})` : null },
        s("title", {}, `client ${found.names[to]} learns from client ${found.names[from]}: ${percent(value)}`));
    }),
    found.names.map((name, i) => {
      const [x, y] = place(i, radius), [tx, ty] = place(i, radius + size + 8);
      const across = tx - middle;
      return [mark(index(i), x, y, size, colour(index(i)), `client ${name}, own share ${percent(own(i))}`),
        named && s("text", { x: tx, y: ty + 4, "text-anchor": Math.abs(across) < 12 ? "middle" : across > 0 ? "start"
          : "end", class: "small" },
          short(name, 6), s("title", {}, name))];
    }),
    same && s("text", { x: middle, y: middle, "text-anchor": "middle" }, told));
}

function helperTable(found, { weight, own }, name) {
  const count = found.names.length;
  return table(["client", "own share", "strongest", "second", "third"], found.names.map((client, i) => {
    const others = strongestOf(count, weight, i, 3).map(j => `${short(found.names[j], 30)} (${percent(weight(i, j))})`);
    return [short(client, 40), percent(own(i)), ...[0, 1, 2].map(at => others[at] || "–")];
  }), { caption: `What each client received in ${name}`, numbers: [1] });
}

// --- Clustered FL's tree ---

function tree(clusters, data) {
  const byNumber = new Map(clusters.map(cluster => [cluster.cluster, cluster]));
  const leaves = [];
  const walk = number => {
    const cluster = byNumber.get(number);
    if (!cluster) return;
    if (cluster.parts.length) cluster.parts.forEach(walk); else leaves.push(number);
  };
  walk(clusters[0].cluster);
  const last = Math.max(data.asked, ...clusters.map(cluster => cluster.divided || cluster.since));
  const rows = new Map(leaves.map((number, i) => [number, i]));
  const row = number => rows.has(number) ? rows.get(number)
    : byNumber.get(number).parts.map(row).reduce((a, b) => a + b, 0) / byNumber.get(number).parts.length;
  const cuts = clusters.filter(cluster => cluster.parts.length);
  const label = `Tree of clusters: ${plural(cuts.length, "cut")}, ${plural(leaves.length, "cluster")} in the end.`;
  const who = cluster => cluster.clients.map(String);
  return section("Clusters",
    h("figure", {}, plot(width => {
      const room = Math.min(180, width * 0.4), step = 30, top = 14, left = 12, height = top + step * leaves.length + 40;
      const x = round => left + (width - left - room) * round / (last || 1),
        y = number => top + step * (row(number) + 0.5);
      const [marks] = ticks(0, last, (width - room) / 50, true);
      return drawing(width, height, label,
        marks.map(value => [
          s("line", { x1: x(value), x2: x(value), y1: top, y2: height - 38, stroke: "var(--grid)" }),
          s("text", { x: x(value), y: height - 24, "text-anchor": "middle", class: "soft" }, String(value))]),
        s("text", { x: x(last / 2), y: height - 6, "text-anchor": "middle" }, "round"),
        clusters.map(cluster => {
          const end = x(cluster.parts.length ? cluster.divided : last), at = y(cluster.cluster);
          return [
            s("line", { x1: x(cluster.since), x2: end, y1: at, y2: at, stroke: "var(--ink)", "stroke-width": 1.8 }),
            cluster.parts.length
              ? [s("line", { x1: end, x2: end, y1: y(cluster.parts[0]), y2: y(cluster.parts[cluster.parts.length - 1]),
                  stroke: "var(--ink)", "stroke-width": 1.8 }),
                mark(0, end, at, 5, colour(1), `cluster ${cluster.cluster} was divided after round ${cluster.divided}`)]
              : s("text", { x: end + 8, y: at + 4 },
                `${cluster.cluster}: ${plural(cluster.clients.length, "client")}`)];
        }));
    }), h("figcaption", {}, "At a dot a cluster was divided, after that round.")),
    more("Who is in which cluster", table(["cluster", "since round", "divided after", "likeness across the cut",
      "clients"],
      clusters.map(cluster => [String(cluster.cluster), String(cluster.since),
        known(cluster.divided) ? String(cluster.divided) : "–",
        known(cluster["cross-similarity"]) ? cluster["cross-similarity"].toFixed(2) : "–",
        cluster.clients.length ? who(cluster).join(", ") : "–"]), { numbers: [1, 2, 3], long: [4],
      caption: "Clusters in the order in which they were made" })));
}

// --- The rest ---

function unused(data) {
  const { unused: found } = data, left = data["left-out"];
  return section("Replies that were not used",
    found.number === 0 && left.length === 0 && h("p", {}, "None: every reply of every client was used."),
    left.length > 0 && table(["client", "left out, because"], left,
      { long: [1], caption: "Clients that took no part" }),
    found.number > 0 && [
      h("p", {}, `${plural(found.number, "reply", "replies")} in all.`,
        found.listed.length < found.reasons && ` Here are ${found.listed.length} of ${found.reasons} kinds.`),
      table(["client", "what was wrong", "times", "first round", "last round"],
        found.listed.map(row => row.map(String)),
        { numbers: [2, 3, 4], long: [1], caption: "By client and reason" })]);
}

function settings(data) {
  const text = value => typeof value === "string" ? value : JSON.stringify(value);
  const differing = data.settings.filter(([, , standard]) => !standard), all = data.settings.length;
  const rows = list => list.map(([name, value]) => [name, text(value)]);
  return section("Configuration",
    data.command && [h("h3", {}, "The command that repeats it"),
      h("pre", {}, data.command)],
    h("div", { class: "pair" },
      table(["setting", "value"], rows(differing), { long: [1], caption:
        differing.length < all ? "Settings that differ from their defaults" : "Settings" }),
      table(["version of", "is"], data.versions.map(([name, value]) => [name, known(value) ? text(value) : "–"]),
        { long: [1], caption: "Versions" })),
    differing.length < all && more("All settings",
      table(["setting", "value"], rows(data.settings), { long: [1], caption: "All settings" })));
}

// --- A comparison ---

function comparison(data) {
  const { methods } = data;
  const curves = methods.map((method, i) => [method, i]).filter(([method]) => method.curve);
  const most = key => Math.max(0, ...curves.flatMap(([method]) => method.curve[key] || []));
  const bytes = unit(most("bytes"), "B"), samples = unit(most("samples"), "");
  const band = curves.some(([method]) => method.curve.low) ? "standard deviation over seeds" : null;
  const lines = (key, size) => curves.filter(([method]) => method.curve[key]).map(([method, i]) => ({ name: method.name,
    x: method.curve[key].map(value => value / size), y: method.curve.mean,
    low: method.curve.low, high: method.curve.high, i, dash: i,
    titles: method.curve.rounds.map(number => `round ${number}`) }));
  const text = value => typeof value === "string" ? value : JSON.stringify(value);
  return [
    header(data, null),
    section("Results",
      data.tables.map(([columns, ...lines], i) => table(columns, lines, { numbers: columns.map((_, at) => at).slice(1),
        caption: ["Accuracy", "What it cost"][i] + (data.seeds.length > 1 ? ", mean ± deviation over seeds" : "") })),
      h("ul", { class: "remarks" }, data.remarks.map(line => h("li", {}, line)))),
    section("Accuracy", h("p", { class: "soft" }, "Mean over clients of each one's accuracy on its own test images" +
      (band ? "; the line is the mean over seeds." : ".")),
      h("div", { class: "pair" },
        lineFigure({ title: "Over rounds", lines: lines("rounds", 1), xName: "round", whole: true, bandName: band,
          caption: besides(curves.map(([method]) => [method.curve.rounds, method.asked])) }),
        lineFigure({ title: "Against bytes", lines: lines("bytes", bytes[1]), xName: `${bytes[0]} sent, both ways`,
          bandName: band }),
        lines("samples", 1).length > 0 && lineFigure({ title: "Against the clients' work",
          lines: lines("samples", samples[1]),
          xName: `${samples[0]} samples trained on`.trim(), bandName: band }),
        spread(methods))),
    section("Runs", table(["method", "seed", "report"],
      methods.flatMap(method => method.runs.map(run => [method.name, String(run.seed),
      run.failed ? `failed: ${run.failed}` : run.report ? h("a", { href: run.report }, run.name)
        : `${run.name}, which is not there`])),
      { numbers: [1], long: [2], caption: "Each run's own report" }),
      methods.some(method => method.settings.length)
        && more("Settings of one method alone", table(["method", "setting", "value"],
        methods.flatMap(method => method.settings.map(([name, value]) => [method.name, name, text(value)])),
        { long: [2], caption: "Besides those that all have" })),
      data.notes.length > 0 && more("Notes on the preset",
        h("ul", { class: "remarks" }, data.notes.map(line => h("li", {}, line))))),
    settings(data),
  ];
}

// Every method's clients, those of all seeds: dots, the middle half, the median.
function spread(methods) {
  const rows = methods.map((method, i) => [method, i]).filter(([method]) => method.accuracies.length);
  if (!rows.length) return null;
  const quantile = (values, share) => {
    const at = share * (values.length - 1), low = Math.floor(at);
    return values[low] + (values[Math.min(low + 1, values.length - 1)] - values[low]) * (at - low);
  };
  const sorted = rows.map(([method]) => [...method.accuracies].sort((a, b) => a - b));
  const label = "How accuracies are distributed over clients. " + rows.map(([method], n) =>
    `${method.name}: ` + [["bottom decile", 0.1], ["median", 0.5], ["top decile", 0.9]].map(([name, share]) =>
      `${name} ${percent(quantile(sorted[n], share))}`).join(", ") + ".").join(" ");
  return figure("Distribution over clients", plot(width => {
    const step = 46, top = 4, left = 6, right = 14, height = top + step * rows.length + 44;
    const range = limits(sorted.flat().map(value => 100 * value));
    const x = value => left + (width - left - right) * (value - range[0]) / (range[1] - range[0]);
    const [marks, size] = ticks(range[0], range[1], width / 62);
    return drawing(width, height, label,
      marks.map(value => [
        s("line", { x1: x(value), x2: x(value), y1: top, y2: height - 40, stroke: "var(--grid)" }),
        s("text", { x: x(value), y: height - 24, "text-anchor": "middle", class: "soft" }, tickText(value, size))]),
      s("text", { x: width / 2, y: height - 6, "text-anchor": "middle" }, "accuracy (%)"),
      rows.map(([method, i], n) => {
        const y = top + step * n + 30, at = share => x(100 * quantile(sorted[n], share)), paint = colour(i);
        const every = Math.max(1, Math.ceil(sorted[n].length / 300));
        return [
          s("text", { x: left, y: y - 15 }, short(method.name, 30)),
          s("line", { x1: at(0.1), x2: at(0.9), y1: y, y2: y, stroke: paint, "stroke-width": 2 }),
          s("rect", { x: at(0.25), width: Math.max(1, at(0.75) - at(0.25)), y: y - 7, height: 14, fill: paint,
            "fill-opacity": 0.3, stroke: paint }),
          sorted[n].filter((_, k) => k % every === 0).map((value, k) =>
            s("circle", { cx: x(100 * value), cy: y + (k % 5 - 2) * 2, r: 2,
            fill: paint, "fill-opacity": 0.55 })),
          s("line", { x1: at(0.5), x2: at(0.5), y1: y - 9, y2: y + 9, stroke: "var(--ink)", "stroke-width": 2.5 }),
        ];
      }));
  }), h("figcaption", {}, "A dot: a client of a seed; line: between the deciles; box: the middle half; bar: median."));
}

// --- Showing, and staying up to date ---

const main = document.getElementById("main"), source = document.getElementById("data");
function show(data) {
  const open = new Set([...main.querySelectorAll("details[open]")].map(each => each.id));
  const focused = document.activeElement && document.activeElement.id;
  plots.length = 0;
  main.replaceChildren(...(data.kind === "comparison" ? comparison(data) : run(data)).filter(Boolean));
  for (const each of main.querySelectorAll("details")) each.open = open.has(each.id);
  drawPlots();
  if (focused && document.getElementById(focused)) document.getElementById(focused).focus({ preventScroll: true });
}
const content = JSON.parse(source.textContent), poll = 1000 * Number(source.dataset.poll);
show({ ...content, live: poll > 0 });

let waiting = false;
addEventListener("resize", () => {
  if (!waiting) requestAnimationFrame(() => { waiting = false; drawPlots(); });
  waiting = true;
});
let opened = [];
addEventListener("beforeprint", () => {
  opened = [...main.querySelectorAll("details:not([open], #more-all-settings)")];
  for (const each of opened) each.open = true;
  drawPlots(PRINTED);
});
addEventListener("afterprint", () => {
  for (const each of opened) each.open = false;
  drawPlots();
});

let tag = "";
async function refresh() {
  let data = null, told = "";
  try {
    const reply = await fetch("data.json", { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
    if (reply.ok) { data = await reply.json(); tag = reply.headers.get("ETag") || ""; }
    else if (reply.status !== 304) told = `Not up to date: ${await reply.text()}`;
  } catch {
    told = "Not up to date: `kindred watch` does not answer; it may have been ended.";
  }
  if (data) show({ ...data, live: true });
  const note = document.getElementById("link");
  if (note) { note.textContent = told; note.hidden = !told; }
  if (!(data && data.finished)) setTimeout(refresh, poll);
}
if (poll && !content.finished) setTimeout(refresh, poll);
})();
"""
