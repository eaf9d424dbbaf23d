// One uPlot chart per run: the library has the axis, the cursor and zooming by selection; the lanes
// are drawn in its draw hook. Both runs show the same span, each from its own start.

const timelines = [];
const view = { from: 0, to: 1, total: 1 };
const narrow = () => window.innerWidth < 640;

function laneLayout(run) {
  const small = narrow(), rows = [];
  let y = small ? 14 : 4;
  for (const lane of run.lanes) {
    const height = lane.kind === "device" ? 34 : lane.group ? 12 : 18;
    const name = lane.kind === "device" ? lane.group : lane.group ? "" : lane.name;
    if (small && name) y += 12;
    rows.push({ lane, name, top: y, height });
    y += height + (lane.kind === "device" ? 2 : small ? 4 : 10);
  }
  return { rows, height: y };
}

function seconds(span) {
  const digits = Math.max(0, Math.min(7, 2 - Math.floor(Math.log10(span))));
  return (v) => (view.total < 1 ? (v * 1e3).toFixed(Math.max(0, digits - 3)) + " ms" : v.toFixed(digits) + " s");
}

function makeTimeline(run, host) {
  const overview = element("canvas", { className: "overview" }), body = element("div");
  const holder = element("div", { className: "run" });
  nameRun(holder, run, "div", "label");
  holder.append(overview, body);
  host.append(holder);
  const timeline = { run, overview, body, chart: null, layout: null };
  timelines.push(timeline);
  bindOverview(overview);
  bindTouch(body);
  buildChart(timeline);
}

function buildChart(timeline) {
  timeline.chart?.destroy();
  const { run, body } = timeline;
  const layout = (timeline.layout = laneLayout(run));
  const gutter = narrow() ? 2 : 92;
  const chart = new uPlot({
    width: body.clientWidth, height: layout.height + 34, legend: { show: false },
    padding: [0, 8, 0, 0],
    scales: { x: { time: false, auto: false, range: (u, a, b) => [a, b] }, y: { auto: false, range: [0, 1] } },
    series: [{}, { show: true, stroke: "transparent", points: { show: false } }],
    axes: [
      { stroke: () => colours.muted, grid: { show: false }, ticks: { stroke: () => colours.line, size: 5 }, size: 32, space: narrow() ? 78 : 90,
        font: font(12),
        values: (u, splits) => splits.map(seconds(u.scales.x.max - u.scales.x.min)) },
      { size: gutter, values: () => [], grid: { show: false }, ticks: { show: false } },
    ],
    cursor: { y: false, points: { show: false }, drag: { x: true, y: false, dist: 4, setScale: false } },
    hooks: {
      draw: [(u) => drawTimeline(u, timeline)],
      setSelect: [(u) => {
        if (u.select.width < 4) return;
        const from = u.posToVal(u.select.left, "x"), to = u.posToVal(u.select.left + u.select.width, "x");
        u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
        setView(from, to);
      }],
      setCursor: [(u) => showTip(u, timeline)],
    },
  }, [[0, view.total], [null, null]], body);
  chart.over.addEventListener("dblclick", (event) => { event.stopImmediatePropagation(); setView(0, view.total); }, true);
  chart.over.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey && !event.shiftKey) return; // the page scrolls
    event.preventDefault();
    const at = chart.posToVal(event.offsetX, "x");
    if (event.shiftKey) move((event.deltaY || event.deltaX) / 600);
    else zoomAround(at, Math.exp(event.deltaY / 300));
  }, { passive: false });
  chart.over.addEventListener("mouseleave", hideTip);
  timeline.chart = chart;
  chart.setScale("x", { min: view.from, max: view.to });
}

function drawTimeline(u, timeline) {
  const ctx = u.ctx, ratio = uPlot.pxRatio, small = narrow();
  ctx.save();
  for (const row of timeline.layout.rows) {
    const box = { left: u.bbox.left, width: u.bbox.width, top: u.bbox.top + row.top * ratio, height: row.height * ratio };
    if (row.name) {
      ctx.font = font(12 * ratio);
      ctx.fillStyle = colours.ink;
      ctx.textAlign = "left";
      ctx.textBaseline = small ? "bottom" : "middle";
      ctx.fillText(row.name, small ? box.left : 2 * ratio, small ? box.top - 1 * ratio : box.top + box.height / 2);
    }
    if (row.lane.start) drawLane(ctx, row.lane, box, ratio);
  }
  ctx.restore();
}

// The strip above: shares of all devices over the whole run, and the part that is shown.
function drawOverview({ overview: canvas, run }) {
  const ratio = devicePixelRatio || 1, ctx = canvas.getContext("2d");
  const width = (canvas.width = Math.round(canvas.clientWidth * ratio));
  const height = (canvas.height = Math.round(canvas.clientHeight * ratio));
  ctx.fillStyle = colours.grid;
  ctx.fillRect(0, 0, width, height);
  const sums = new Float32Array(width * colours.category.length);
  for (const lane of run.lanes)
    if (lane.kind === "device" && lane.start) shares(lane, 0, view.total, width).forEach((v, i) => { sums[i] += v; });
  drawShares(ctx, sums, { left: 0, top: 0, height }, 0);
  const left = (view.from / view.total) * width, right = (view.to / view.total) * width;
  ctx.fillStyle = colours.card;
  ctx.globalAlpha = 0.62;
  ctx.fillRect(0, 0, left, height);
  ctx.fillRect(right, 0, width - right, height);
  ctx.globalAlpha = 1;
  ctx.strokeStyle = colours.ink;
  ctx.lineWidth = 1.5 * ratio;
  ctx.strokeRect(Math.min(left, width - 3), 1, Math.max(right - left, 2.5 * ratio), height - 2);
}

function bindOverview(canvas) {
  let held = null; // how far behind the start of what is shown the pointer holds it
  const at = (event) => ((event.clientX - canvas.getBoundingClientRect().left) / canvas.clientWidth) * view.total;
  const drag = (event) => {
    if (held !== null) setView(at(event) - held, at(event) - held + (view.to - view.from));
  };
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    const t = at(event);
    held = t >= view.from && t <= view.to ? t - view.from : (view.to - view.from) / 2;
    drag(event);
  });
  canvas.addEventListener("pointermove", drag);
  for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, () => { held = null; });
}

function bindTouch(element) {
  let last = null;
  const two = (event) => {
    const [a, b] = event.touches, box = element.getBoundingClientRect();
    return { at: ((a.clientX + b.clientX) / 2 - box.left) / box.width, apart: Math.max(20, Math.abs(a.clientX - b.clientX)) };
  };
  element.addEventListener("touchstart", (event) => { last = event.touches.length === 2 ? two(event) : null; }, { passive: true });
  element.addEventListener("touchmove", (event) => {
    if (!last || event.touches.length !== 2) return;
    event.preventDefault();
    const now = two(event), span = (view.to - view.from) * (last.apart / now.apart);
    const anchor = view.from + last.at * (view.to - view.from);
    last = now;
    setView(anchor - now.at * span, anchor - now.at * span + span);
  }, { passive: false });
}

let drawing = false;
function redraw() {
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(() => {
    drawing = false;
    for (const timeline of timelines) {
      timeline.chart.setScale("x", { min: view.from, max: view.to });
      drawOverview(timeline);
    }
  });
}

let hashTimer = 0;
function setView(from, to, remember = true) {
  const span = Math.min(view.total, Math.max(to - from, 20e-6));
  view.from = Math.min(Math.max(0, from), view.total - span);
  view.to = view.from + span;
  hideTip();
  redraw();
  if (remember) {
    clearTimeout(hashTimer);
    hashTimer = setTimeout(() => {
      history.replaceState(null, "", `#t=${view.from.toFixed(6)},${view.to.toFixed(6)}`);
    }, 250);
  }
}
function zoomAround(at, factor) { setView(at - (at - view.from) * factor, at + (view.to - at) * factor); }
function zoom(factor) { zoomAround((view.from + view.to) / 2, factor); }
function move(part) { const by = part * (view.to - view.from); setView(view.from + by, view.to + by); }

function viewFromHash() {
  const match = /^#t=([\d.]+),([\d.]+)$/.exec(location.hash);
  if (match) setView(Number(match[1]), Number(match[2]), false);
  return Boolean(match);
}

const tip = document.getElementById("tip");
function hideTip() { tip.hidden = true; }
function duration(s) { return s >= 1 ? s.toFixed(3) + " s" : s >= 1e-3 ? (s * 1e3).toFixed(3) + " ms" : (s * 1e6).toFixed(1) + " µs"; }

function showTip(u, timeline) {
  const { left, top } = u.cursor;
  if (left === null || left < 0) return hideTip();
  const t = u.posToVal(left, "x");
  const row = timeline.layout.rows.find((r) => top >= r.top && top < r.top + r.height);
  if (!row?.lane.start) return hideTip();
  const lane = row.lane;
  let hit = -1;
  const stop = above(lane.start, t);
  for (let i = Math.max(above(lane.reach, t) , stop - 64); i < stop; i++)
    if (lane.end[i] > t && (hit < 0 || !isWait[lane.what[i]] || lane.kind === "device")) hit = i;
  if (hit < 0) return hideTip();
  const busy = lane.kind === "device" && data.kind_of[lane.what[hit]] === 0;
  const name = lane.kind === "device" ? (busy ? "forward" : data.cause_text[lane.what[hit]]) : data.phases[lane.what[hit]].replaceAll("_", " ");
  const lines = [`${lane.group || lane.name} · ${duration(lane.end[hit] - lane.start[hit])}`];
  if (lane.iteration[hit] >= 0 && name !== "idle") lines.push(`${busy || lane.kind !== "device" ? "iteration" : "before iteration"} ${lane.iteration[hit]} · slot ${lane.slot[hit]}`);
  if (lane.batch?.[hit]) lines.push(`${lane.batch[hit]} sequences · ${lane.tokens[hit]} tokens`);
  if (lane.kind === "device" && !busy) lines.unshift(title(data.kinds[data.kind_of[lane.what[hit]]]) + (data.kind_of[lane.what[hit]] < working.length ? " bubble" : ""));
  lines.push(`from ${lane.start[hit].toFixed(6)} s`);
  tip.replaceChildren(element("b", { textContent: name }), ...lines.map((text) => element("div", { textContent: text })));
  tip.hidden = false;
  const box = u.over.getBoundingClientRect();
  tip.style.left = Math.min(box.left + left + 14, window.innerWidth - tip.offsetWidth - 6) + "px";
  tip.style.top = Math.min(box.top + top + 16, window.innerHeight - tip.offsetHeight - 6) + "px";
}
