// Putting the page together. Figures and curves first; the lanes follow as they are decoded.

const $ = (id) => document.getElementById(id);
let longest = [], nextBubble = 0;

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  readColours();
  if (timelines.length) redraw();
  for (const build of plots) build();
}

function describe() {
  const s = data.runs[0].summary;
  const parts = data.runs.map((run) => run.summary.label).join(" against ");
  const facts = [s.model.startsWith("/") ? s.model.split("/").pop() : s.model, `${s.stages} stages`, `${s.inflight} microbatches in flight`, s.samplers ? `${s.samplers} sampler${s.samplers > 1 ? "s" : ""}` : "", `${s.iterations.toLocaleString("en")} iterations in ${number(s.wall_s)} s`, s.idle_s ? `${number(s.idle_s)} s of them without requests` : ""];
  $("what").textContent = [parts, ...facts.filter(Boolean)].join(" · ");
  $("foot").textContent = `SiPipe ${data.version} · times to ${data.quantum_ns} ns`;
  const warnings = data.runs.flatMap((run) => [...run.summary.warnings, ...(run.left_out.length ? [`Left out of the timeline for size: ${run.left_out.join(", ")}. Use --from and --to for a page of a part.`] : [])]);
  if (warnings.length) {
    $("warnings").hidden = false;
    $("warnings").append(element("h2", { textContent: "Remarks" }), ...warnings.map((text) => element("p", { textContent: text })));
  }
}

// A dozen iterations where the devices are busiest: what a pipeline looks like.
function firstView() { setView(...data.runs[0].busiest, false); }

function buildTools() {
  const tool = (text, label, act) => {
    const button = element("button", { type: "button", textContent: text, ariaLabel: label, title: label });
    button.addEventListener("click", act);
    $("tools").append(button);
  };
  tool("←", "Move back", () => move(-0.5));
  tool("→", "Move on", () => move(0.5));
  tool("+", "Zoom in", () => zoom(0.5));
  tool("−", "Zoom out", () => zoom(2));
  tool("All", "Show everything", () => setView(0, view.total));
  tool("Iterations", "Show a dozen iterations", firstView);
  tool("Next bubble", "Show the next long bubble", walk);
}

function walk() {
  if (longest.length) showBubble(longest[nextBubble++ % longest.length]);
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName)) return;
  const inside = $("timeline").contains(event.target) || event.target === document.body;
  const keys = {
    ArrowLeft: () => move(-0.25), ArrowRight: () => move(0.25), a: () => move(-0.25), d: () => move(0.25),
    "+": () => zoom(0.5), "=": () => zoom(0.5), w: () => zoom(0.5), "-": () => zoom(2), s: () => zoom(2),
    0: () => setView(0, view.total), Home: () => setView(0, view.total), n: walk,
  };
  const act = keys[event.key.length === 1 ? event.key.toLowerCase() : event.key];
  if (!act || !inside) return;
  event.preventDefault();
  act();
}

async function start() {
  const query = matchMedia("(prefers-color-scheme: dark)");
  const wanted = /[?&]theme=(dark|light)/.exec(location.search)?.[1];
  document.documentElement.dataset.theme = wanted || (query.matches ? "dark" : "light");
  readColours();
  query.addEventListener("change", () => setTheme(query.matches ? "dark" : "light"));
  $("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
  view.total = Math.max(...data.runs.map((run) => run.summary.wall_s));
  view.to = view.total;
  describe();
  drawTiles($("tiles"));
  drawNext($("next"));
  drawLegend($("legend"));
  buildTools();
  drawBreakdown($("breakdown"));
  drawCdfs($("cdf"));
  drawUtilization($("util"));
  drawBubbles($("bubbles"));
  drawPhases($("phases"));
  for (const run of data.runs) makeTimeline(run, $("timeline"));
  if (!viewFromHash()) firstView();
  window.addEventListener("hashchange", viewFromHash);
  document.addEventListener("keydown", onKey);
  let width = 0;
  new ResizeObserver(() => {
    if (width === document.body.clientWidth) return;
    width = document.body.clientWidth;
    timelines.forEach(buildChart);
    for (const build of plots) build();
    redraw();
  }).observe(document.body);
  for (const run of data.runs) for (const lane of run.lanes) { await decodeLane(lane); redraw(); }
  longest = findLongest();
  drawLongest($("longest"), longest);
}

const ready = start().catch((error) => {
  const text = typeof DecompressionStream === "undefined" ? "This browser is too old for the timeline (it lacks DecompressionStream)." : `The page failed: ${error.message}`;
  $("warnings").hidden = false;
  $("warnings").append(text);
  throw error;
});
// For scripts and tests: await sipipe.ready, then sipipe.zoom(seconds, seconds).
window.sipipe = { ready, zoom: setView, view: () => ({ ...view }), lanes: () => data.runs.map((run) => run.lanes) };
