// --- Each client: the verdict on it or its last value, and its curve; sites that only validate ---

const MOST_SHOWN = 30;  // clients of a table that is not folded

function everyClient(data) {
  const found = data.verdict, named = data.table.some(each => each.name);
  if (!found && data.table.length < 2) return null;
  const title = found ? "Better than training alone?" : "Clients";
  const listed = found ? verdictTable(found, data.table, named) : valueTable(data.table, named);
  return section(title,
    found && [h("p", {}, h("strong", {}, `${found.sentence}.`)),
      h("p", { class: "soft" }, "Both models of a client are compared on the same test samples. The p values are those "
        + "of McNemar's exact test, for numbers of Wilcoxon's, corrected for the number of clients by Holm's method. "
        + "Intervals are of 95 %.")],
    found || data.table.length <= MOST_SHOWN ? listed : more("Every client", listed),
    everyCurve(data), clientCurve(data));
}

// The curves of all clients in one figure, where they are few.
function everyCurve({ table: clients, curves, curve, asked }) {
  if (!curves || clients.length > COLOURS || curve.rounds.length < 2) return null;
  const titles = curve.rounds.map(number => roundName(number, asked));
  return lineFigure({ title: "Every client", whole: true, xName: "round", lines: clients.map((each, i) =>
    ({ name: `client ${each.name || each.client}`, x: curve.rounds, y: curves[i], i, dash: i, titles })) });
}

const count = value => known(value) ? String(value) : "–";
const rounded = value => String(Number(value.toPrecision(4)));
const targets = each => known(each.classes) ? String(each.classes)
  : each.range ? `${rounded(each.range[0])} to ${rounded(each.range[1])}` : "–";
const targetsTitle = clients => clients.some(each => each.range) ? "range of the target" : "classes";

function verdictTable(found, clients, named) {
  const score = value => known(value) ? (found.percent ? percent(value) : value.toPrecision(4)) : "–";
  const points = value => found.percent && known(value) ? (100 * value).toFixed(1) : score(value);
  const signed = value => `${value > 0 ? "+" : ""}${points(value)}`;
  const about = new Map(clients.map(each => [each.client, each]));
  return clientTable(found.clients, named, [
    ["test samples", each => count(each.samples)], [targetsTitle(clients), each => targets(about.get(each.client) || {})],
    ["alone", each => score(each.alone)], ["federated", each => score(each.federated)],
    [found.percent ? "gain in points" : "gain", each => signed(each.gain)],
    ["interval", each => `${signed(each.low)} to ${signed(each.high)}`],
    ["p", each => each.p.toPrecision(2)], ["verdict", each => each.verdict]],
    each => (about.get(each.client) || {}).name);
}

function valueTable(clients, named) {
  const selected = clients.some(each => known(each.selected));
  return clientTable(clients, named, [
    ["training samples", each => count(each.train)], ["test samples", each => count(each.test)],
    [targetsTitle(clients), targets], [`last ${metric.title}`, each => inUnits(each.last)],
    selected && ["of the selected model", each => inUnits(each.selected)]], each => each.name);
}

// columns: pairs of title and text of a client; all but the verdict hold numbers.
function clientTable(clients, named, columns, nameOf) {
  const all = [["client", each => each.client], named && ["name", each => nameOf(each) || "–"], ...columns]
    .filter(Boolean);
  const texts = new Set(["client", "name", "verdict"]);
  return table(all.map(([title]) => title), clients.map(each => all.map(([, text]) => text(each))), {
    caption: "Every client", numbers: all.map((_, i) => i).filter(i => !texts.has(all[i][0])) });
}

// The metric of the client that the reader chooses, over rounds.
function clientCurve({ table: clients, curves, curve, asked }) {
  if (!curves || clients.length < 2) return null;
  const label = each => each.name ? `${each.client} ${each.name}` : each.client;
  const choice = h("select", { id: "curve-of" }, h("option", { value: -1 }, "none"), clients.map((each, i) =>
    h("option", { value: i, selected: each.client === kept.curve }, short(label(each), 40))));
  const place = h("div");
  let box = null;
  function show() {
    const i = Number(choice.value);
    if (box) plots.splice(plots.findIndex(each => each.box === box), 1);
    const before = plots.length;
    place.replaceChildren(...(i < 0 ? [] : [lineFigure({ title: `Client ${label(clients[i])}`, whole: true,
      xName: "round", lines: [
        { name: `client ${label(clients[i])}`, x: curve.rounds, y: curves[i], i: 0 },
        { name: "mean over clients", x: curve.rounds, y: curve.mean, i: 6, dash: 1 }],
      caption: specialRounds([[curve.rounds, asked]]) })]));
    box = plots.length > before ? plots[before].box : null;
  }
  choice.addEventListener("change", () => {
    kept.curve = Number(choice.value) < 0 ? null : clients[Number(choice.value)].client;
    show();
    drawPlots();
  });
  show();
  return [h("div", { class: "choice" }, h("label", { for: "curve-of" }, "Curve of client ", choice)), place];
}

function validators(sites) {
  if (!sites.length) return null;
  const names = [...new Set(sites.flatMap(each => each.metrics.map(([name]) => name)))];
  return section("Sites that only validate",
    h("p", { class: "soft" }, "They evaluate the global model, or the plain mean of the clients' models, on all of "
      + "their labelled samples. They train nothing, and are part of no other number of this page."),
    table(["site", "samples", ...names, "last evaluation"], sites.map(each => {
      const values = new Map(each.metrics);
      return [each.client, count(each.samples),
        ...names.map(name => values.has(name) ? rounded(values.get(name)) : "–"), each.status];
    }), { caption: "Every site that only validates", numbers: [...names.map((_, i) => i + 2), 1],
      long: [names.length + 2] }));
}
