// What is read rather than looked at: tiles, bars and tables.

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

// Where two runs are compared, each part of the page says which run it shows.
const compared = data.runs.length > 1;
function nameRun(host, run, tag, className) {
  if (compared) host.append(element(tag, { className, textContent: run.summary.label }));
}
const stageName = (s) => `stage ${s.stage}` + (s.rank ? `.${s.rank}` : "");
const title = (kind) => ({ busy: "Busy", load_imbalance: "Load imbalance", intra_stage: "Intra-stage", inter_stage: "Inter-stage", unscheduled: "Unscheduled", idle: "No requests" }[kind] || kind);
const working = data.kinds.slice(0, -1); // what time with requests is made of; the last kind is time without
const number = (v, digits = 3) => (v == null ? "–" : v >= 1000 ? Math.round(v).toLocaleString("en") : Number(v.toPrecision(digits)).toString());
const share = (v) => (v * 100).toFixed(v < 0.0995 ? 1 : 0) + "%";

function tile(name, values, { unit = "", better = 0, format = number, beside = "" } = {}) {
  const [first, second] = values; // `beside`: a line on how it differs from a figure of the same name
  const box = element("div", { className: "tile" }, element("div", { className: "name", textContent: name }));
  box.append(element("div", { className: "value" }, format(first) + " ", element("small", { textContent: unit })));
  if (beside) box.append(element("div", { className: "other", textContent: beside }));
  if (second != null && first != null) {
    const ratio = second ? first / second : null;
    const line = element("div", { className: "other" }, `against ${format(second)} `);
    if (ratio && better) line.append(element("span", { className: (ratio > 1) === (better > 0) ? "up" : "down", textContent: `× ${ratio.toFixed(2)}` }));
    box.append(line);
  }
  return box;
}

function stack(shares, scale = 1) {
  const bar = element("div", { className: "stack", role: "img", ariaLabel: working.map((k) => `${title(k)} ${share(shares[k])}`).join(", ") });
  for (const kind of working) {
    const part = element("i", { title: `${title(kind)}: ${share(shares[kind])}` });
    part.style.width = shares[kind] * scale * 100 + "%";
    part.style.background = `var(--${kind})`;
    part.className = kind === "load_imbalance" || kind === "unscheduled" ? `${kind} dark` : kind;
    if (shares[kind] * scale > 0.06) part.textContent = share(shares[kind]);
    bar.append(part);
  }
  return bar;
}

// Milliseconds of a stage for each of its iterations, of the time with requests.
const perIteration = (s) => (s.iterations ? (s.wall_ns - s.ns.idle) / s.iterations / 1e6 : 0);
const meanIteration = (s) => s.stage_table.reduce((sum, stage) => sum + perIteration(stage), 0) / s.stage_table.length;

// What keeps the devices waiting most, and what to change about it.
function drawNext(host) {
  for (const run of data.runs) {
    nameRun(host, run, "div", "label");
    host.append(element("p", { textContent: run.summary.next }));
  }
}

function drawTiles(host) {
  const all = data.runs.map((run) => run.summary), pick = (f) => all.map(f);
  host.append(
    tile("Device busy", pick((s) => s.share.busy), { format: (v) => (v * 100).toFixed(1) + "%", better: 1 }),
    tile("Throughput", pick((s) => s.tokens_per_s), { unit: "tokens/s", better: 1 }),
    tile("Iteration, median", pick((s) => s.iteration_ms.p50), { unit: "ms", better: -1, beside: `mean ${number(meanIteration(all[0]))} ms: with prompts and waits` }),
    tile("TPOT, median", pick((s) => s.tpot_ms.p50), { unit: "ms", better: -1 }),
    tile("TPOT, 99 %", pick((s) => s.tpot_ms.p99), { unit: "ms", better: -1 }),
  );
  if (all[0].prefill_efficiency != null)
    host.append(tile("Prefill efficiency", pick((s) => s.prefill_efficiency), { format: (v) => (v * 100).toFixed(1) + "%", better: 1 }));
  if (all[0].sampler_ms_per_sequence != null)
    host.append(tile("Sampler per sequence", pick((s) => s.sampler_ms_per_sequence && s.sampler_ms_per_sequence * 1e3).slice(0, 1), { unit: "µs" }));
  const wide = element("div", { className: "tile wide" }, element("div", { className: "name", textContent: "Time of all devices" + (all.some((s) => s.idle_s) ? ", while there were requests" : "") }));
  const runs = element("div", { className: "runs" });
  for (const run of data.runs) {
    nameRun(runs, run, "div", "label");
    runs.append(stack(run.summary.share));
  }
  wide.append(runs, legendKeys(working.map((k) => [title(k), `var(--${k})`])));
  host.append(wide);
}

function legendKeys(pairs) {
  const box = element("div", { className: "legend" });
  for (const [name, colour] of pairs) {
    const key = element("span", { className: "key", textContent: name });
    key.style.setProperty("--c", colour);
    box.append(key);
  }
  return box;
}

function drawLegend(host) {
  const slots = Math.min(SLOTS, Math.max(...data.runs.map((run) => run.summary.inflight)));
  const hosts = [["schedule, update", "schedule"], ["dispatch", "dispatch"], ["prepare", "prepare"], ["send", "send"], ["sample", "sample"], ["waiting", "wait"]];
  for (const [name, pairs] of [
    ["Microbatches", Array.from({ length: slots }, (_, s) => [`slot ${s}`, `slot${s}`])],
    ["Bubbles", working.slice(1).map((k) => [title(k), k])],
    ["Host, in the colour of the bubble that it can cause", hosts],
  ]) host.append(element("div", {}, element("b", { textContent: name }), ...legendKeys(pairs.map(([text, colour]) => [text, `var(--${colour})`])).childNodes));
}

function drawBreakdown(host) {
  const longest = Math.max(...data.runs.flatMap((run) => run.summary.stage_table.map(perIteration)), 1e-9);
  for (const run of data.runs) {
    nameRun(host, run, "div", "group");
    for (const s of run.summary.stage_table) {
      host.append(element("div", { className: "row" },
        element("div", { textContent: stageName(s) }),
        stack(s.share, perIteration(s) / longest),
        element("div", { className: "end", textContent: number(perIteration(s)) + " ms" })));
    }
  }
}

function table(columns, rows) {
  const head = element("tr", {}, ...columns.map((c) => element("th", { textContent: c.name, className: c.text ? "text" : "", scope: "col" })));
  const body = rows.map((row) => {
    const line = element("tr", { className: row.className || "" }, ...columns.map((c) =>
      element("td", { className: c.text ? "text" : "" }, ...[c.cell(row)].flat())));
    if (row.colour) line.style.setProperty("--c", row.colour);
    return line;
  });
  return element("table", { className: "figures" }, element("thead", {}, head), element("tbody", {}, ...body));
}

function drawBubbles(host) {
  for (const run of data.runs) {
    const stages = run.summary.stage_table, sum = (f) => stages.reduce((total, s) => total + f(s), 0);
    const rows = [];
    const add = (name, values, extra) => rows.push({ name, values, total: values.reduce((a, b) => a + b, 0), ...extra });
    data.kinds.forEach((kind, k) => {
      if (kind === "idle") {
        add("Time with requests", stages.map((s) => s.wall_ns - s.ns.idle), { className: "sum" });
        if (!sum((s) => s.ns.idle)) return;
      }
      add(title(kind), stages.map((s) => s.ns[kind]), { className: "kind", colour: `var(--${kind})` });
      if (k && kind !== "idle") data.causes.forEach((cause, c) => {
        const values = stages.map((s) => s.cause_ns[cause] || 0);
        if (data.kind_of[c] === k && values.some(Boolean)) add(data.cause_text[c], values, { className: "cause" });
      });
    });
    if (sum((s) => s.ns.idle)) add("Wall time", stages.map((s) => s.wall_ns), { className: "sum" });
    const ms = (ns, s) => ns / 1e6 / Math.max(1, s.iterations);
    nameRun(host, run, "h3", "");
    host.append(table([
      { name: "ms per iteration", text: true, cell: (r) => (r.className === "kind" ? [element("span", { className: "dot" }), r.name] : r.name) },
      ...stages.map((s, i) => ({ name: stageName(s), cell: (r) => number(ms(r.values[i], s)) })),
      { name: "mean", cell: (r) => number(r.values.reduce((sum, ns, i) => sum + ms(ns, stages[i]), 0) / stages.length) },
      { name: "seconds", cell: (r) => number(r.total / 1e9, 4) },
      // Of the time with requests, as everywhere on the page: without a load no pipeline is busy.
      { name: "share", cell: (r) => (r.total > sum((s) => s.wall_ns - s.ns.idle) || r.name === title("idle") ? "" : share(r.total / sum((s) => s.wall_ns - s.ns.idle))) },
    ], rows));
  }
}

// The longest bubbles of every run, but for pauses and the end; also what the N key walks through.
function findLongest(count = 8) {
  const found = [], none = ["busy", "nothing", "idle"].map((cause) => data.causes.indexOf(cause));
  data.runs.forEach((run, index) => {
    const own = [];
    for (const lane of run.lanes) {
      if (lane.kind !== "device") continue;
      for (let i = 0; i < lane.count; i++) {
        if (none.includes(lane.what[i]) || lane.iteration[i] < 0) continue;
        const span = lane.end[i] - lane.start[i];
        if (own.length === count && span <= own[count - 1].span) continue;
        own.push({ run: index, lane, i, span, kind: data.kind_of[lane.what[i]], start: lane.start[i] });
        own.sort((a, b) => b.span - a.span);
        own.length = Math.min(own.length, count);
      }
    }
    found.push(...own);
  });
  return found;
}

function drawLongest(host, found) {
  if (!found.length) return host.append("No bubble but for pauses.");
  const go = (b) => {
    const link = element("a", { href: "#", textContent: b.start.toFixed(4) + " s" });
    link.addEventListener("click", (event) => { event.preventDefault(); showBubble(b); });
    return [link];
  };
  host.append(table([
    { name: "kind", text: true, cell: (b) => [element("span", { className: "dot" }), title(data.kinds[b.kind])] },
    ...(compared ? [{ name: "run", text: true, cell: (b) => data.runs[b.run].summary.label }] : []),
    { name: "stage", text: true, cell: (b) => b.lane.group },
    { name: "because", text: true, cell: (b) => data.cause_text[b.lane.what[b.i]] },
    { name: "before iteration", cell: (b) => String(b.lane.iteration[b.i]) },
    { name: "lasted", cell: (b) => duration(b.span) },
    { name: "at", cell: go },
  ], found.map((b) => ({ ...b, colour: `var(--${data.kinds[b.kind]})` }))));
}

function showBubble(b) {
  setView(b.start - 3 * b.span, b.start + 4 * b.span);
  document.getElementById("timeline").scrollIntoView({ block: "center" });
}

function drawPhases(host) {
  for (const run of data.runs) {
    nameRun(host, run, "h3", "");
    host.append(table([
      { name: "process", text: true, cell: (r) => r.process },
      { name: "phase", text: true, cell: (r) => r.phase.replaceAll("_", " ") },
      { name: "count", cell: (r) => r.count.toLocaleString("en") },
      { name: "mean ms", cell: (r) => number(r.mean_ms) },
      { name: "median ms", cell: (r) => number(r.p50_ms) },
      { name: "99 % ms", cell: (r) => number(r.p99_ms) },
      { name: "share of wall", cell: (r) => share(r.share) },
    ], run.summary.phase_table));
  }
}
