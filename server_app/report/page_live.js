// --- This moment: what a run waits for, and its sites ---

function live(now) {
  if (!now) return null;
  return section("Now",
    now.problems.map(line => h("p", { role: "alert" }, h("strong", {}, coded(`${capital(line)}.`)))),
    h("p", { id: "doing", role: "status" }, h("strong", {}, `${capital(now.doing)}.`)),
    known(now.left) && h("p", { class: "soft" }, `About ${time(now.left)} left, if rounds take as long as so far.`),
    now.sites.length > 0
      ? table(["site", "SuperNode", "last message", "in this run"], now.sites, { long: [3],
        caption: "Every site that the server knows" })
      : h("p", { class: "soft" }, "No site has connected yet."),
    now.runs.length > 1 && more(`All runs: ${now.runs.length}`, h("ul", {}, now.runs.map(([name, began, state, link]) =>
      h("li", {}, h("a", { href: link }, name), `, begun ${began}: ${state}`)))));
}

// The page of a server without results of a run.
const server = data => [header(data, ""), live(data.now)];
