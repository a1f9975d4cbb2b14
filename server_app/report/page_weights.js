// --- Weights over rounds: of the clients that one client learns from, and in FedEM's components ---

const MOST_CURVES = 40;  // of a figure: those with the largest weights

// curves: { name, at, y, own }, y with nulls; `at` is the client's place in `groups`.
function weightPlot(curves, rounds, groups, says) {
  const grouped = new Set(groups || []).size > 1, index = groupIndex(groups);
  const largest = ({ y }) => Math.max(0, ...y.filter(known));
  const shown = [...curves].sort((a, b) => largest(b) - largest(a)).slice(0, MOST_CURVES);
  if (!shown.some(curve => curve.own)) shown.push(...curves.filter(curve => curve.own));
  const most = Math.max(...curves.map(largest)) || 1;
  return plot(width => framed(width, { across: [rounds[0] - 0.5, rounds[rounds.length - 1] + 0.5],
    upward: [0, 1.04 * most], xName: "round", yName: "weight", whole: true, label: says,
    inside: (x, y) => shown.sort((a, b) => Boolean(a.own) - Boolean(b.own)).map(curve => {
      const points = curve.y.map((value, i) => [x(rounds[i]), value]).filter(([, value]) => known(value));
      const path = points.map(([px, value], i) => `${i ? "L" : "M"}${px.toFixed(1)} ${y(value).toFixed(1)}`).join("");
      return s("path", { d: path, fill: "none", "stroke-width": curve.own ? 3.4 : 1.5, "stroke-linejoin": "round",
        stroke: grouped ? colour(index(curve.at)) : curve.own ? colour(0) : "var(--soft)",
        "stroke-dasharray": curve.own || !grouped ? null : DASHES[index(curve.at) % DASHES.length] || null },
        s("title", {}, curve.name));
    }) }));
}
function weightLegend(groups, own) {
  const found = [...new Set(groups || [])].sort((a, b) => a - b);
  const line = (text, attributes) => h("li", {}, s("svg", { width: 34, height: 12, "aria-hidden": "true" },
    s("line", { x1: 0, x2: 34, y1: 6, y2: 6, ...attributes })), text);
  return h("ul", { class: "legend" },
    found.length > 1 && found.length <= COLOURS && found.map((group, i) => line(groupName(group),
      { stroke: colour(i), "stroke-width": 1.5, "stroke-dasharray": DASHES[i % DASHES.length] || null })),
    own && line("thick: the client itself", { stroke: "var(--ink)", "stroke-width": 3.4 }));
}

// The row of the collaboration matrix over rounds, for a client that the reader chooses.
function overRounds(found, asked) {
  const count = found.names.length;
  const at = found.rounds.map((_, i) => i).filter(i => found.rounds[i] <= asked);
  if (at.length < 2) return null;
  const rounds = at.map(i => found.rounds[i]);
  const weights = at.map(i => bytesOf(found.weights[i])), own = at.map(i => bytesOf(found.own[i]));
  const choice = h("select", { id: "learner" }, found.names.map((name, i) =>
    h("option", { value: i, selected: name === kept.learner }, short(name, 40))));
  const place = h("div");
  function show() {
    const i = Number(choice.value);
    const curves = found.names.map((name, j) => ({ name: `client ${name}`, at: j, own: i === j,
      y: at.map((number, n) => i === j ? own[n][i] / 255
        : weights[n][i * count + j] * found.strongest[number] / 255) }));
    const silent = at.map((_, n) => curves.every(curve => curve.y[n] === 0));  // no weights are known
    for (const curve of curves) curve.y = curve.y.map((value, n) => silent[n] ? null : value);
    const last = curves.filter(curve => curve.y.length).map(curve => [curve.name, curve.y[curve.y.length - 1] || 0])
      .sort((a, b) => b[1] - a[1]).slice(0, 3).map(([name, value]) => `${name} ${percent(value)}`).join(", ");
    place.replaceChildren(weightPlot(curves, rounds, found.groups,
      `Weights over rounds in what client ${found.names[i]} received. Largest at the end: ${last}.`));
  }
  choice.addEventListener("change", () => {
    kept.learner = found.names[Number(choice.value)];
    plots.splice(plots.findIndex(each => each.box === place.firstChild), 1);
    show();
    drawPlots();
  });
  show();
  return figure("Over rounds", h("label", { for: "learner" }, "Client that learns ", choice), place,
    weightLegend(found.groups, true), h("figcaption", {},
      `A line is the weight of one client's model in each round` +
      (count > MOST_CURVES ? `; the ${MOST_CURVES} clients with the largest weights.` : ".")));
}

function components(found) {
  return found && section("Shares of the components",
    h("p", { class: "soft" }, "How much of each component a client predicts with, as the clients reported it."),
    h("div", { class: "pair" }, found.shares.map((shares, m) => {
      const end = shares[shares.length - 1];
      const using = end.filter(share => share >= 0.5).length;
      return figure(`Component ${m}`, weightPlot(found.names.map((name, i) =>
        ({ name: `client ${name}`, at: i, y: shares.map(row => row[i]) })), found.rounds, found.groups,
        `Shares of component ${m} over rounds. At the end ${plural(using, "client")} of ${end.length} ` +
        "use it for half of their prediction or more."), weightLegend(found.groups, false));
    })));
}
