// --- A run ---

function run(data) {
  const { curve, figures: sum, clients } = data;
  const rounds = curve.rounds.filter(number => number >= 1 && number <= data.asked).length;
  const bytes = unit(Math.max(0, ...curve.bytes), "B");
  const samples = curve.samples && unit(Math.max(0, ...curve.samples), "");
  const inRounds = curve.rounds.map(number => roundName(number, data.asked));
  const against = (title, x, xName) => lineFigure({ title, xName, lines: [
    { name: "mean over clients", x, y: curve.mean, low: curve.p10, high: curve.p90, i: 0, titles: inRounds }],
    bandName: "bottom to top decile of clients" });
  return [
    header(data, data.finished ? `Finished: ${plural(rounds, "round")}`
      : data.live && !(data.now && data.now.ended) ? `In progress: ${rounds} of ${plural(data.asked, "round")}`
      : `Not finished: ${rounds} of ${plural(data.asked, "round")}`),
    live(data.now),
    figures([
      [`mean ${metric.title}`, inUnits(sum.mean)], ["best mean, by test data", inUnits(sum.best)],
      known(sum.selected) && ["mean of selected models", inUnits(sum.selected)],
      [metric.decile, inUnits(sum["worst-decile"])], ["mean by test size", inUnits(sum.weighted)],
      ["sent, both ways", amount(sum["bytes-down"] + sum["bytes-up"], "B")],
      known(sum["samples-trained"]) && ["samples trained", amount(sum["samples-trained"], "")],
      ["time of all rounds", time(sum.seconds)],
    ]),
    everyClient(data),
    section(capital(metric.title),
      h("p", { class: "soft" },
        `${capital(metric.title)} of each client on its own test samples. `,
        "A client that skips a round keeps its last value.",
        data.stages.personal && ` The ${metric.title} is that of: ${data.stages.personal}.`),
      h("div", { class: "pair" },
        lineFigure({ title: "Over rounds", whole: true, xName: "round", lines: [
          { name: "mean over clients", x: curve.rounds, y: curve.mean, low: curve.p10, high: curve.p90, i: 0,
            titles: inRounds }],
          bandName: "bottom to top decile of clients", caption: specialRounds([[curve.rounds, data.asked]]) }),
        against("Against bytes", curve.bytes.map(v => v / bytes[1]), `${bytes[0]} sent, both ways`),
        samples && against("Against the clients' work", curve.samples.map(v => v / samples[1]),
          `${samples[0]} samples trained on`.trim()),
        distribution(clients)),
      more("Numbers of every round", table(
        ["round", "mean", "bottom decile", "top decile", "sent", ...(samples ? ["samples"] : [])],
        curve.rounds.map((number, i) => [roundName(number, data.asked, ""), inUnits(curve.mean[i]), inUnits(curve.p10[i]),
          inUnits(curve.p90[i]),
          amount(curve.bytes[i], "B"), ...(samples ? [amount(curve.samples[i], "")] : [])]),
        { caption: "After each round", numbers: [0, 1, 2, 3, 4, 5] }))),
    beforeAfter(data),
    data.collaboration && together(data.collaboration, data.asked),
    components(data.components),
    data.clusters && tree(data.clusters, data),
    data.partition && section("Data of each client", h("figure", {}, h("img", { src: data.partition,
      alt: "Heatmap: number of training samples of each client" }),
      h("figcaption", {}, "Training samples of each client, by class or label where there are any."))),
    data.networks && section("Networks of the clients", h("figure", {}, h("img", { src: data.networks,
      alt: "Bar chart: number of clients with each network" }),
      h("figcaption", {}, "The more samples a client has, the more likely it has a larger network."))),
    metrics(data.metrics),
    newcomers(data.newcomers),
    validators(data.validators),
    settings(data),
    unused(data),
    remarks(data.remarks),
  ];
}

// All metrics: their means over clients, and their values for all clients' test samples together.
function metrics(found) {
  if (!found || !found.rows.length) return null;
  const pooled = known(found.samples);
  return section("All metrics",
    h("p", { class: "soft" },
      found.selected ? "Of each client's model that is best on its validation data. " : "Of each client's last model. ",
      "Intervals are of 95 %: of the mean over clients, which are drawn anew",
      pooled ? "; of the pooled predictions over clients and their samples." : "."),
    table(["metric", "clients", "mean over clients", ...(pooled ? [`all ${plural(found.samples, "test sample")}`] : [])],
      found.rows.map(row => pooled ? row : row.slice(0, 3)),
      { caption: "On clients' test samples", numbers: [1, 2, 3] }));
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

// A block for each client, stacked at its last value.
function distribution({ names, groups, last: values }) {
  const at = values.map((_, i) => i).filter(i => known(values[i]));
  if (!at.length) return null;
  const index = groupIndex(groups);
  const low = Math.min(...at.map(i => values[i])), high = Math.max(...at.map(i => values[i]));
  const step = metric.percent ? [0.01, 0.025].find(size => (high - low) / size <= 12) || 0.05
    : ticks(low, high > low ? high : low + (Math.abs(low) || 1), 12)[1];
  const end = metric.percent ? Math.round(1 / step) - 1 : Infinity;
  const bin = i => Math.min(Math.floor(values[i] / step + 1e-9), end);
  const stacks = new Map();
  for (const i of [...at].sort((a, b) => index(a) - index(b) || values[a] - values[b]))
    stacks.set(bin(i), [...(stacks.get(bin(i)) || []), i]);
  const tallest = Math.max(...[...stacks.values()].map(stack => stack.length));
  const first = Math.min(...stacks.keys()), last = Math.max(...stacks.keys());
  const sorted = at.map(i => values[i]).sort((a, b) => a - b), median = sorted[Math.floor(sorted.length / 2)];
  const label = `Distribution of ${metric.plural} over ${plural(at.length, "client")}: ` +
    `from ${inUnits(low)} to ${inUnits(high)}, ` +
    `half of them at ${inUnits(median)} or more.`;
  return figure("Distribution over clients", plot(width => framed(width, {
    across: [scaled(step * (first - 0.5)), scaled(step * (last + 1.5))], upward: [0, Math.max(4, tallest + 0.5)],
    xName: metric.axis, yName: "clients", label,
    inside: (x, y) => [...stacks].map(([number, stack]) => stack.map((i, up) => {
      const left = x(scaled(step * number)) + 1, wide = x(scaled(step * (number + 1))) - 1 - left, tall = y(0) - y(1);
      return s("rect", { x: left, width: Math.max(1, wide), y: y(up + 1),
        height: Math.max(0.5, tall - (tall > 4 ? 1 : 0)),
        fill: colour(index(i)) }, s("title", {}, `client ${names[i]}: ${inUnits(values[i])}`));
    })) })), groupLegend(groups), h("figcaption", {}, `Each block is a client, at its last ${metric.title}.`));
}

function beforeAfter({ curve, stages, clients }) {
  const lines = stages.curves.map((each, i) =>
    ({ name: each.name, x: curve.rounds, y: each.mean, i: [1, 0, 2, 3][i], dash: i }));
  const at = clients.names.map((_, i) => i).filter(i => known(clients.before[i]) && known(clients.after[i]));
  if (lines.length < 2 && !at.length) return null;
  const index = groupIndex(clients.groups);
  const gained = at.filter(i => isBetter(clients.after[i], clients.before[i])).length;
  const lost = at.filter(i => isBetter(clients.before[i], clients.after[i])).length;
  const values = at.flatMap(i => [scaled(clients.before[i]), scaled(clients.after[i])]);
  const range = at.length ? limits(values) : null;
  const mixed = stages.after === "mixture";
  const title = `Each client: ${stages["after-name"]}, against ${mixed ? "one model alone" : "as received"}`;
  return section(mixed ? "One model and the mixture" : "Before and after",
    h("p", { class: "soft" }, mixed
      ? "One of the models that a client received, alone and before training, and the mixture of models with which the "
        + "client predicts."
      : "The model that a client received, and the model that the client made from it with its own data."),
    h("div", { class: "pair" },
      lineFigure({ title: "Mean over clients", lines, xName: "round", whole: true }),
      at.length && figure(title, plot(width => framed(width, {
        across: range, upward: range, square: true, xName: `${stages["before-name"]}: ${metric.axis}`,
        yName: `${stages["after-name"]}: ${metric.axis}`,
        label: `Each client's ${metric.title} ${mixed ? "of one model and of the mixture" : "before and after"}: `
          + `${gained} of ${at.length} gained, ${lost} lost.`,
        inside: (x, y) => [
          s("line", { x1: x(range[0]), y1: y(range[0]), x2: x(range[1]), y2: y(range[1]), stroke: "var(--soft)",
            "stroke-dasharray": "4 4" }),
          apart(at.map(i => [x(scaled(clients.before[i])), y(scaled(clients.after[i])), i])).map(([px, py, i]) => mark(
            index(i), px, py, 4.5, colour(index(i)),
            `client ${clients.names[i]}: ${inUnits(clients.before[i])}, ${mixed ? "mixture" : "then"} `
              + inUnits(clients.after[i])))] })),
        groupLegend(clients.groups),
        h("figcaption", {},
          `Last reported ${metric.plural}. Clients ${metric.higher ? "above" : "below"} the line gained` +
          `${mixed ? " by the mixture" : ""}: ` +
          `${gained} of ${at.length}; ${lost} lost. Points that coincide are drawn side by side.`))));
}
// Points [x, y, ...], those that coincide moved to places around the first one.
function apart(points) {
  const seen = new Map();
  return points.map(([x, y, ...more]) => {
    const key = `${Math.round(x)} ${Math.round(y)}`, n = seen.get(key) || 0;
    seen.set(key, n + 1);
    const far = n && 4 * Math.sqrt(n), turn = 2.4 * n;  // a spiral whose places do not overlap
    return [x + far * Math.cos(turn), y + far * Math.sin(turn), ...more];
  });
}
