// --- The page of a site ---

function site(data) {
  return [
    header(data, coded(`${capital(data.doing)}.`)),
    figures([["messages", String(data["messages-in-all"])], ["received", amount(data["bytes-in"], "B")],
      ["left the site", amount(data["bytes-out"], "B")], ["faults and refusals", String(data.faults.length)]]),
    section("Faults and refusals", data.faults.length ? data.faults.map(([last, times, what, advice]) => [
      h("p", {}, h("strong", {}, coded(capital(what)))),
      h("p", {}, coded(advice), " ", h("span", { class: "soft" }, `${plural(Number(times), "time")}, last ${last}.`))])
      : h("p", {}, "None.")),
    section("The site's model", data.runs.length ? data.runs.map(modelOfSite)
      : h("p", {}, "No run has trained or evaluated a model here yet.")),
    section("Messages", data.messages.length ? [
      h("p", { class: "soft" }, "Arrays hold numbers of models, or what the method sends in their place."),
      table(["round", "asked", "what left", "left", "received", "took", "time", "run"], data.messages,
        { numbers: [3, 4, 5], caption: "The latest first" }),
      more("Names of all numbers and texts that left the site", table(["name", "is a", "in", "messages"], data.names,
        { numbers: [3], caption: "Numbers and texts that left the site" }))]
      : h("p", {}, "None.")),
    section("The site's data", data.lines.map(line => h("p", {}, coded(line))),
      data.classes.length > 0 && more("Samples of each class", table(["class", "training samples", "test samples"],
        data.classes, { numbers: [1, 2], caption: "Samples of each class" }))),
  ];
}

function modelOfSite({ run, method, rounds, federated, alone }) {
  const compared = alone.some(known);
  return [
    lineFigure({ title: `${capital(metric.title)} over rounds: ${method}, run ${run}`, whole: true, xName: "round",
      lines: [{ name: "federated", x: rounds, y: federated, i: 0 }, { name: "trained alone", x: rounds, y: alone, i: 6,
        dash: 1 }] }),
    h("p", { class: "soft" }, "On the site's own test samples. ", compared
      ? "Trained alone: the model that the site trains without the others, on the same data."
      : "The run trains no model alone, so the two are not compared; its setting shadow-local=true does this."),
  ];
}
