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
  const label = `Tree of clusters: ${plural(cuts.length, "cut")}, ${plural(leaves.length, "cluster")} at the end.`;
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
    }), h("figcaption", {}, "A dot marks the round after which a cluster was divided.")),
    more("Clients of each cluster", table(["cluster", "since round", "divided after", "largest cosine across the cut",
      "clients"],
      clusters.map(cluster => [String(cluster.cluster), String(cluster.since),
        known(cluster.divided) ? String(cluster.divided) : "–",
        known(cluster["cross-similarity"]) ? cluster["cross-similarity"].toFixed(2) : "–",
        cluster.clients.length ? who(cluster).join(", ") : "–"]), { numbers: [1, 2, 3], long: [4],
      caption: "Clusters in the order in which they were made" })));
}

// --- Clients that came later ---

function newcomers(tables) {
  if (!tables) return null;
  const [means, clients] = tables.map(([columns, ...lines]) => [columns, lines]);
  const numbers = columns => columns.map((_, at) => at).slice(1);
  return section("Clients that came later",
    h("p", { class: "soft" }, "They took no part in the run. After it each was served with some or all of its labelled "
      + "training samples. Alone: trained by the client for as many rounds as the run had. Tuned global model: trained "
      + "by the client for one round. Values are of the clients' test samples, which chose nothing."),
    table(means[0], means[1], { caption: "Means over these clients", numbers: numbers(means[0]) }),
    more("Each of these clients", table(clients[0], clients[1], { caption: "Clients that came later",
      numbers: numbers(clients[0]) })));
}

// --- The rest ---

function unused(data) {
  const { unused: found } = data, left = data["left-out"];
  return section("Replies that were not used",
    found.number === 0 && left.length === 0 && h("p", {}, "None: every reply of every client was used."),
    left.length > 0 && table(["client", "reason"], left,
      { long: [1], caption: "Excluded clients" }),
    found.number > 0 && [
      h("p", {}, `${plural(found.number, "reply", "replies")} in all.`,
        found.listed.length < found.reasons &&
          ` The table lists ${found.listed.length} of ${found.reasons} pairs of client and reason.`),
      table(["client", "reason", "replies", "first round", "last round"],
        found.listed.map(row => row.map(String)),
        { numbers: [2, 3, 4], long: [1], caption: "By client and reason" })]);
}

// What is named once for a client: samples and updates that stand out.
function remarks(found) {
  return found.length > 0 && section("Clients that stand out",
    h("p", { class: "soft" }, "Each is named once, whether its samples or updates were bounded or not."),
    table(["client", "what", "round"], found.map(row => row.map(String)),
      { numbers: [2], long: [1], caption: "Numbers of samples and norms of updates" }));
}

function settings(data) {
  const text = value => typeof value === "string" ? value : JSON.stringify(value);
  const differing = data.settings.filter(([, , standard]) => !standard), all = data.settings.length;
  const rows = list => list.map(([name, value]) => [name, text(value)]);
  return section("Configuration",
    data.command && [h("h3", {}, "Command to run this again"),
      h("pre", {}, data.command)],
    h("div", { class: "pair" },
      differing.length ? table(["setting", "value"], rows(differing), { long: [1], caption:
        differing.length < all ? "Settings that differ from their defaults" : "Settings" })
        : h("p", {}, "All settings have their defaults."),
      table(["version of", "is"], data.versions.map(([name, value]) => [name, known(value) ? text(value) : "–"]),
        { long: [1], caption: "Versions" })),
    differing.length < all && more("All settings",
      table(["setting", "value"], rows(data.settings), { long: [1], caption: "All settings" })));
}
