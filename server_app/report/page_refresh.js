// --- Showing, and staying up to date ---

const main = document.getElementById("main"), source = document.getElementById("data");
const PAGES = { run, comparison, server, site };
const openDetails = () => [...main.querySelectorAll("details[open]")].map(each => each.id);
function openOnly(ids) {
  for (const each of main.querySelectorAll("details")) each.open = ids.includes(each.id);
}
function show(data) {
  const open = openDetails();
  const focused = document.activeElement && document.activeElement.id;
  plots.length = 0;
  metric = data.metric;
  main.replaceChildren(...PAGES[data.kind](data).filter(Boolean));
  openOnly(open);
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

const isOver = data => data.finished && !data.now;  // a server may have another run
let tag = "";
async function refresh() {
  let data = null, problem = "";
  try {
    const reply = await fetch("data.json", { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
    if (reply.ok) { data = await reply.json(); tag = reply.headers.get("ETag") || ""; }
    else if (reply.status !== 304) problem = `Not up to date: ${await reply.text()}`;
  } catch {
    problem = "Not up to date: the program that serves this page does not answer; it may have ended.";
  }
  if (data) show({ ...data, live: true });
  const note = document.getElementById("link");
  if (note) { note.textContent = problem; note.hidden = !problem; }
  if (!(data && isOver(data))) setTimeout(refresh, poll);
}
if (poll && !isOver(content)) setTimeout(refresh, poll);

// A file cannot be fetched: the page of a site is reloaded as a whole, and the same details are open again.
if (content.kind === "site") {
  openOnly((sessionStorage.getItem(location.pathname) || "").split(" "));
  if (content.reload) setInterval(() => {
    if (document.hidden) return;
    sessionStorage.setItem(location.pathname, openDetails().join(" "));
    location.reload();
  }, 1000 * content.reload);
}
