// --- Collaboration: which client learns from which ---

const bytesOf = text => Uint8Array.from(atob(text), character => character.charCodeAt(0));

function together(found, asked) {
  if (!found.rounds.length)
    return section("Who learns from whom", h("p", {}, found["too-many"]
      ? `The matrix of ${found["too-many"]} clients is too large for this page; it is in the folder collaboration/.`
      : `The files in collaboration/ cannot be read: ${found.damaged.join(", ")}.`));
  const count = found.names.length, last = found.rounds.length - 1;
  const strongest = Math.max(...found.strongest) || 1;
  let at = kept.round === null ? last : Math.max(0, found.rounds.findLastIndex(number => number <= kept.round));
  const decoded = new Map();
  const round = () => {  // weight(i, j): share of client j in what client i received, i != j; own(i)
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
  const matrixBox = plot(width => matrix(width, found, round(), strongest, found.rounds[at], name()));
  const graphBox = plot(width => graph(width, found, round(), strongest, name()));
  const helpers = h("div");
  const name = () => roundName(found.rounds[at], asked);
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
  const order = found.groups ? "Clients are ordered by true group."
    : "Clients that learn from each other are side by side (hierarchical clustering of the last round).";
  const some = found.rounds.length < found.of
    ? ` This page shows ${found.rounds.length} of ${found.of} rounds; all are in the folder collaboration/.` : "";
  return section("Who learns from whom",
    h("p", { class: "soft" }, `${order} Weights are rounded to one of 256 steps.${some}`,
      found.damaged.length ? ` Files that cannot be read: ${found.damaged.join(", ")}.` : ""),
    h("div", { class: "controls" },
      h("label", { for: "round" }, "Round", slider, output),
      h("label", { for: "edges", class: "short-control" }, "Arrows per client", edges, edgesOutput)),
    h("div", { class: "pair" },
      figure("Matrix", matrixBox, colourBar(strongest),
        h("figcaption", {}, "Row: the client that learns. Column: the client it learns from. ",
          "Grey: a client's own share, which is not on the colour scale.")),
      figure("Graph", graphBox, groupLegend(found.groups),
        h("figcaption", {}, "Arrows point to the client that learns. A thicker arrow means a larger share.")),
      overRounds(found, asked)),
    more("Largest shares for each client", helpers));
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

function matrix(width, found, { weight, own, bytes }, strongest, number, name) {
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
    `Collaboration matrix of ${plural(count, "client")} at ${name}. ` + (strongestPair
      ? `The largest share of another client is ${percent(weight(...strongestPair))}: ` +
        `client ${found.names[strongestPair[0]]} learns from client ${found.names[strongestPair[1]]}.`
          : "No client learns from another."),
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
  const found = [];  // without sorting all shares, which takes seconds for a thousand clients
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

function graph(width, found, { weight, own, bytes }, strongest, name) {
  const count = found.names.length, named = count <= 40;
  const side = Math.min(width, 540), middle = side / 2, longest = Math.min(10, Math.max(...found.names.map(name => name.length)));
  const radius = middle - (named ? Math.max(48, 24 + 7 * longest) : 26);
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
  const summary = alone ? "no client learns from another" : "every other client has the same share";
  const label = `Graph at ${name}: ` + (same ? `${summary}.`
    : `${plural(edges.length, "arrow")}, from the ${kept.edges} largest shares of each client.`);
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
          short(name, 10), s("title", {}, name))];
    }),
    same && s("text", { x: middle, y: middle, "text-anchor": "middle" }, summary));
}

function helperTable(found, { weight, own }, name) {
  const count = found.names.length;
  return table(["client", "own share", "largest other", "second", "third"], found.names.map((client, i) => {
    const others = strongestOf(count, weight, i, 3).map(j => `${short(found.names[j], 30)} (${percent(weight(i, j))})`);
    return [short(client, 40), percent(own(i)), ...[0, 1, 2].map(at => others[at] || "–")];
  }), { caption: `Shares in what each client received in ${name}`, numbers: [1] });
}
