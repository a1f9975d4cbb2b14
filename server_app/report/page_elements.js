const COLOURS = 7, DASHES = ["", "7 4", "8 3 2 3", "2 3", "10 2 2 2 2 2"], SHAPES = 6;
const VIRIDIS = ["440154", "48186a", "472d7b", "424086", "3b528b", "33638d", "2c728e", "26828e", "21918c", "1fa088",
  "28ae80", "3fbc73", "5ec962", "84d44b", "addc30", "d8e219", "fde725"].map(text =>
  [0, 2, 4].map(at => parseInt(text.slice(at, at + 2), 16)));
const OWN = [176, 176, 176, 255];
let metric = null;  // of the page: title, axis, plural, decile, percent, higher, bounds
// The reader's choices; null: the last round, the first client, no curve.
const kept = { round: null, edges: 2, learner: null, curve: null };
const plots = [];  // { box, draw }: each figure is drawn to the width of its box
const PRINTED = 330;  // width of a printed column, in pixels

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
const coded = text => text.split("`").map((part, i) => i % 2 ? h("code", {}, part) : part);  // commands in backticks
const colour = i => `var(--c${i % COLOURS})`;
const known = value => value !== null && value !== undefined;

// --- Numbers as text ---

const percent = (value, digits = 1) => known(value) ? `${(100 * value).toFixed(digits)} %` : "–";
const scaled = value => metric.percent ? 100 * value : value;
const inUnits = value => metric.percent ? percent(value) : known(value) ? String(Number(value.toPrecision(4))) : "–";
const isBetter = (first, second) => metric.higher ? first > second : first < second;
const capital = text => text[0].toUpperCase() + text.slice(1);
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

// A frame with axes over the ranges `across` and `upward`. `inside(x, y)` draws in it; x and y map values to positions.
// `names`: texts in place of the numbers 0, 1, 2 and so on of the horizontal axis.
function framed(width, { across, upward, xName, yName, whole, label, inside, square, names }) {
  const top = 26, bottom = 44;
  const height = square ? Math.min(width, 420) : Math.round(Math.max(230, Math.min(340, width * 0.62)));
  if (square) width = height;
  const [from, to] = across, [low, high] = upward;
  const [yTicks, yStep] = ticks(low, high, (height - top - bottom) / 34);
  const left = Math.max(42, 14 + 7 * Math.max(...yTicks.map(value => tickText(value, yStep).length)));
  const right = Math.max(14, 4 * String(Math.round(to)).length);
  const x = value => left + (width - left - right) * (value - from) / (to - from || 1);
  const y = value => height - bottom - (height - top - bottom) * (value - low) / (high - low || 1);
  const [xTicks, xStep] = names ? [names.map((_, i) => i), 1] : ticks(from, to, (width - left) / 62, whole);
  return drawing(width, height, label,
    yTicks.map(value => [
      s("line", { x1: left, x2: width - right, y1: y(value), y2: y(value), stroke: "var(--grid)" }),
      s("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end", class: "soft" }, tickText(value, yStep))]),
    xTicks.map(value => [
      s("line", { x1: x(value), x2: x(value), y1: height - bottom, y2: height - bottom + 4, stroke: "var(--soft)" }),
      s("text", { x: x(value), y: height - bottom + 18, "text-anchor": "middle", class: "soft" },
        names ? short(names[value], 8) : tickText(value, xStep))]),
    s("line", { x1: left, x2: width - right, y1: height - bottom, y2: height - bottom, stroke: "var(--soft)" }),
    s("text", { x: 2, y: 13 }, yName),
    s("text", { x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle" }, xName),
    inside(x, y, width, height));
}

// Axis limits for values of the metric as they are shown, with a margin.
function limits(values) {
  const low = Math.min(...values), high = Math.max(...values), margin = metric.percent ? 1 : 0.04 * (high - low);
  const step = metric.percent ? 5 : ticks(low, high > low ? high : low + (Math.abs(low) || 1), 5)[1];
  return [Math.max(metric.bounds[0] ?? -Infinity, Math.floor((low - margin) / step) * step),
    Math.min(metric.bounds[1] ?? Infinity, Math.ceil((high + margin) / step) * step)];
}

// lines: { name, x, y, low, high, i, dash, plain }, y values of the metric with nulls.
// `like`: other lines, whose figures have the same vertical axis.
function lineFigure({ title, lines, xName, whole, says, caption, bandName, names, like = [] }) {
  lines = lines.filter(line => line.y.some(known));
  const all = [...lines, ...like].flatMap(line => [line.y, line.low || [], line.high || []].flat()).filter(known)
    .map(scaled);
  if (!lines.length) return figure(title, h("p", { class: "soft" }, `No client has reported its ${metric.title} yet.`));
  const xs = lines.flatMap(line => line.x.filter((_, at) => known(line.y[at])));
  const [lowest, highest] = [metric.bounds[0] ?? -Infinity, metric.bounds[1] ?? Infinity];
  const upward = limits(all.map(v => Math.max(lowest, Math.min(highest, v))));
  const [least, most] = [Math.min(...xs), Math.max(...xs)];
  const across = whole ? [least - 0.5, most + 0.5] : [Math.min(0, least), 1.03 * most || 1];
  const path = pairs => pairs.map(([px, py], at) => `${at ? "L" : "M"}${px.toFixed(1)} ${py.toFixed(1)}`).join("");
  const label = `${title}. ${says || lines.map(describe).join(" ")}`;
  return figure(title, plot(width => framed(width,
    { across, upward, xName, yName: metric.axis, whole, label, names, inside: (x, y) => [
    lines.map(line => {
      if (!line.low) return null;
      const at = line.x.map((_, i) => i).filter(i => known(line.low[i]) && known(line.high[i]));
      const edge = (side, order) => order.map(i =>
        [x(line.x[i]), y(Math.max(upward[0], Math.min(upward[1], scaled(side[i]))))]);
      if (at.length === 1)
        return s("line", { x1: x(line.x[at[0]]), x2: x(line.x[at[0]]), y1: y(scaled(line.low[at[0]])),
          y2: y(scaled(line.high[at[0]])),
          stroke: colour(line.i), "stroke-width": 12, "stroke-opacity": 0.2 });
      return s("path", { d: path([...edge(line.low, at), ...edge(line.high, [...at].reverse())]) + "Z",
        fill: colour(line.i),
        "fill-opacity": 0.16 });
    }),
    lines.map(line => {
      const at = line.x.map((_, i) => i).filter(i => known(line.y[i]));
      const every = Math.max(1, Math.ceil(at.length / 20));
      return [
        s("path", { d: path(at.map(i => [x(line.x[i]), y(scaled(line.y[i]))])), fill: "none", stroke: colour(line.i),
          "stroke-width": 2.2, "stroke-dasharray": DASHES[line.dash ?? 0] || null, "stroke-linejoin": "round" }),
        at.filter((_, n) => n % every === 0 || n === at.length - 1).map(i =>
          mark(line.dash ?? 0, x(line.x[i]), y(scaled(line.y[i])), 3.6, colour(line.i),
            `${line.name}, ${line.titles ? line.titles[i] : xName + " " + line.x[i]}: ${inUnits(line.y[i])}`)),
      ];
    }),
  ] })), legend(lines, bandName), caption && h("figcaption", {}, caption));
}
function describe(line) {
  const at = line.y.map((_, i) => i).filter(i => known(line.y[i]));
  const [first, last] = [at[0], at[at.length - 1]];
  const best = at.reduce((a, b) => isBetter(line.y[b], line.y[a]) ? b : a, first);
  return `${line.name}: first ${inUnits(line.y[first])}, last ${inUnits(line.y[last])}, ` +
    `best ${inUnits(line.y[best])}.`;
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
// A round's name; the evaluations before the first and after the last training round are no rounds.
const roundName = (number, asked, before = "round ") => number === 0 ? "before training"
  : number > asked ? "closing evaluation" : `${before}${number}`;
// Explanation of rounds without training; pairs: the rounds of a curve, and the number of training rounds.
function specialRounds(pairs) {
  const sentences = [
    pairs.some(([rounds]) => rounds.includes(0)) && "Round 0 is the evaluation before training.",
    pairs.some(([rounds, asked]) => rounds.some(number => number > asked))
      && "The last point is a closing evaluation of the final models, after the last training round."];
  return sentences.filter(Boolean).join(" ") || null;
}
const figure = (title, ...children) => h("figure", {}, title && h("h3", {}, title), ...children);
const section = (title, ...children) => h("section", {}, h("h2", {}, title), ...children);

// `numbers` and `long`: the columns that hold numbers, and those that hold texts of any length. A head sorts the rows.
function table(columns, rows, { caption, numbers = [], long = [] }) {
  const kind = i => numbers.includes(i) ? "number" : long.includes(i) ? "long" : null;
  const head = (name, i) => {
    const button = h("button", { type: "button" }, name);
    button.addEventListener("click", () => sortBy(button.closest("th"), i));
    return h("th", { scope: "col", class: kind(i) }, rows.length > 1 ? button : name);
  };
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
    h("table", {}, h("caption", {}, caption),
      h("thead", {}, h("tr", {}, columns.map(head))),
      h("tbody", {}, rows.map(row => h("tr", {}, row.map((cell, i) =>
        i === 0 ? h("th", { scope: "row", class: kind(i) }, cell) : h("td", { class: kind(i) }, cell)))))));
}
// The number at the beginning of a cell, with its unit; NaN where there is none.
const UNITS = { kB: 1e3, MB: 1e6, GB: 1e9 };
function cellNumber(text) {
  const [first, unit] = text.replace(/,(?=\d{3})/g, "").split(" ");
  return parseFloat(first) * (UNITS[unit] || 1);
}
// Sort the rows of a head's table by its column: numbers from the largest, texts from A; a second time the other way.
function sortBy(head, column) {
  const body = head.closest("table").tBodies[0];
  const rows = [...body.rows].map(row => [row.cells[column].textContent, row]);
  const numeric = head.classList.contains("number") || rows.every(([text]) => !Number.isNaN(cellNumber(text)));
  const [first, second] = numeric ? ["descending", "ascending"] : ["ascending", "descending"];
  const order = head.getAttribute("aria-sort") === first ? second : first;
  for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", order);
  const sign = order === "ascending" ? 1 : -1;
  const unknown = text => numeric && Number.isNaN(cellNumber(text));  // always last
  rows.sort(([a], [b]) => unknown(a) || unknown(b) ? unknown(a) - unknown(b)
    : sign * (numeric ? cellNumber(a) - cellNumber(b) : a.localeCompare(b)));
  body.append(...rows.map(([, row]) => row));
}
const more = (title, ...children) => h("details", { id: "more-" + title.toLowerCase().replace(/[^a-z]+/g, "-") },
  h("summary", {}, title), ...children);
const figures = pairs => h("dl", { class: "figures" }, pairs.filter(Boolean).map(([name, text]) =>
  h("div", {}, h("dt", {}, name), h("dd", {}, text))));
