// --- A comparison ---

function comparison(data) {
  const { methods, varied } = data;
  const bases = [...new Set(methods.map(method => method.of))];  // a varied method is several in `methods`
  const panels = varied && new Set(methods.filter(method => method.value).map(method => method.of)).size > 1;
  const curves = methods.map((method, i) => [method, i]).filter(([method]) => method.curve);
  const most = key => Math.max(0, ...curves.flatMap(([method]) => method.curve[key] || []));
  const bytes = unit(most("bytes"), "B"), samples = unit(most("samples"), "");
  const band = curves.some(([method]) => method.curve.low) ? "standard deviation over seeds" : null;
  const lines = (key, size) => curves.filter(([method]) => method.curve[key]).map(([method, i]) => ({ name: method.name,
    method, x: method.curve[key].map(value => value / size), y: method.curve.mean,
    low: method.curve.low, high: method.curve.high, i, dash: i,
    titles: method.curve.rounds.map(number => roundName(number, method.asked)) }));
  const text = value => typeof value === "string" ? value : JSON.stringify(value);
  return [
    header(data, null),
    section("Results",
      data.tables.map(([columns, ...lines], i) => table(columns, lines, { numbers: columns.map((_, at) => at).slice(1),
        caption: [capital(metric.title), "Costs", "Clients that came later"][i] +
          (data.seeds.length > 1 ? ", mean ± standard deviation over seeds" : "") })),
      h("ul", { class: "remarks" }, data.remarks.map(line => h("li", {}, line)))),
    section(capital(metric.title), h("p", { class: "soft" },
      `Mean over clients of each client's ${metric.title} on its own test samples` +
      (band ? "; the line is the mean over seeds." : ".")),
      h("div", { class: "pair" },
        panels && varied.values.map(value => lineFigure({ title: `Over rounds, ${varied.setting} ${value}`,
          lines: lines("rounds", 1).filter(({ method }) => method.value === value || !method.value).map(line => {
            const i = bases.indexOf(line.method.of);
            return { ...line, name: line.method.of, i, dash: i };
          }), xName: "round", whole: true, bandName: band, like: lines("rounds", 1) })),
        !panels && lineFigure({ title: "Over rounds", lines: lines("rounds", 1), xName: "round", whole: true,
          bandName: band,
          caption: specialRounds(curves.map(([method]) => [method.curve.rounds, method.asked])) }),
        varied && overValues(methods, varied, bases),
        !panels && lineFigure({ title: "Against bytes", lines: lines("bytes", bytes[1]),
          xName: `${bytes[0]} sent, both ways`, bandName: band }),
        !panels && lines("samples", 1).length > 0 && lineFigure({ title: "Against the clients' work",
          lines: lines("samples", samples[1]),
          xName: `${samples[0]} samples trained on`.trim(), bandName: band }),
        spread(methods))),
    section("Runs", table(["method", "seed", "report"],
      methods.flatMap(method => method.runs.map(run => [method.name, String(run.seed),
      run.failed ? `failed: ${run.failed}` : run.report ? h("a", { href: run.report }, run.name)
        : `${run.name} (not found)`])),
      { numbers: [1], long: [2], caption: "Report of each run" }),
      methods.some(method => method.settings.length)
        && more("Settings of single methods", table(["method", "setting", "value"],
        methods.flatMap(method => method.settings.map(([name, value]) => [method.name, name, text(value)])),
        { long: [2], caption: "In addition to the settings that all methods share" })),
      data.notes.length > 0 && more("Notes on the preset",
        h("ul", { class: "remarks" }, data.notes.map(line => h("li", {}, line))))),
    settings(data),
  ];
}

// The metric over the values of a varied setting; a method that is not varied is a horizontal line.
function overValues(methods, { setting, values, measure }, bases) {
  const lines = bases.map((base, i) => {
    const points = methods.filter(method => method.of === base && known(method.at.mean)).flatMap(({ value, at }) =>
      (value ? [values.indexOf(value)] : [0, values.length - 1]).map(x => ({ x, ...at })));
    const ends = sign => points.every(({ std }) => known(std)) ? points.map(({ mean, std }) => mean + sign * std) : null;
    return { name: base, x: points.map(point => point.x), y: points.map(point => point.mean), low: ends(-1),
      high: ends(1), i, dash: i, titles: points.map(point => values[point.x]) };
  });
  return lineFigure({ title: `Over ${setting}`, lines, xName: setting, whole: true, names: values,
    bandName: lines.some(line => line.low && line.low.length) ? "standard deviation over seeds" : null,
    caption: `${capital(measure)}.` });
}

// The clients of each method, over all seeds: dots, middle half, median.
function spread(methods) {
  const rows = methods.map((method, i) => [method, i]).filter(([method]) => method.last.length);
  if (!rows.length) return null;
  const quantile = (values, share) => {
    const at = share * (values.length - 1), low = Math.floor(at);
    return values[low] + (values[Math.min(low + 1, values.length - 1)] - values[low]) * (at - low);
  };
  const sorted = rows.map(([method]) => [...method.last].sort((a, b) => a - b));
  const label = `Distribution of ${metric.plural} over clients. ` + rows.map(([method], n) =>
    `${method.name}: ` + [["bottom decile", 0.1], ["median", 0.5], ["top decile", 0.9]].map(([name, share]) =>
      `${name} ${inUnits(quantile(sorted[n], share))}`).join(", ") + ".").join(" ");
  return figure("Distribution over clients", plot(width => {
    const step = 46, top = 4, left = 6, right = 14, height = top + step * rows.length + 44;
    const range = limits(sorted.flat().map(scaled));
    const x = value => left + (width - left - right) * (value - range[0]) / (range[1] - range[0]);
    const [marks, size] = ticks(range[0], range[1], width / 62);
    return drawing(width, height, label,
      marks.map(value => [
        s("line", { x1: x(value), x2: x(value), y1: top, y2: height - 40, stroke: "var(--grid)" }),
        s("text", { x: x(value), y: height - 24, "text-anchor": "middle", class: "soft" }, tickText(value, size))]),
      s("text", { x: width / 2, y: height - 6, "text-anchor": "middle" }, metric.axis),
      rows.map(([method, i], n) => {
        const y = top + step * n + 30, at = share => x(scaled(quantile(sorted[n], share))), paint = colour(i);
        const every = Math.max(1, Math.ceil(sorted[n].length / 300));
        return [
          s("text", { x: left, y: y - 15 }, short(method.name, 30)),
          s("line", { x1: at(0.1), x2: at(0.9), y1: y, y2: y, stroke: paint, "stroke-width": 2 }),
          s("rect", { x: at(0.25), width: Math.max(1, at(0.75) - at(0.25)), y: y - 7, height: 14, fill: paint,
            "fill-opacity": 0.3, stroke: paint }),
          sorted[n].filter((_, k) => k % every === 0).map((value, k) =>
            s("circle", { cx: x(scaled(value)), cy: y + (k % 5 - 2) * 2, r: 2,
            fill: paint, "fill-opacity": 0.55 })),
          s("line", { x1: at(0.5), x2: at(0.5), y1: y - 9, y2: y + 9, stroke: "var(--ink)", "stroke-width": 2.5 }),
        ];
      }));
  }), h("figcaption", {}, "Dot: one client of one seed. Line: bottom to top decile. Box: middle half. Bar: median."));
}
