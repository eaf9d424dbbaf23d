// Curves: cumulative distributions and utilization over time.

const plots = []; // functions that build a chart anew, in the colours and width of the moment

function plot(host, heading, series, options) {
  const body = element("div");
  host.append(element("div", {}, element("h3", { textContent: `${heading} (${options.unit})` }), body));
  const tables = series.map((s) => [s.x, s.y]);
  const joined = tables.length > 1 ? uPlot.join(tables) : tables[0];
  const axis = (own) => ({
    stroke: () => colours.muted, grid: { stroke: () => colours.grid }, ticks: { show: false }, font: font(12), ...own,
  });
  let chart = null;
  const build = () => {
    chart?.destroy();
    chart = new uPlot({
      width: body.clientWidth, height: 230, padding: [8, 12, 0, 0],
      scales: { x: { time: false, range: options.x, ...(options.log ? { distr: 3, log: 2 } : {}) }, y: { range: options.y } },
      cursor: { y: false, drag: { x: true, y: false } },
      // A key is a piece of its line: two lines of one colour differ by their dashes alone.
      legend: { markers: { width: 2, fill: "transparent", dash: (u, i) => (u.series[i].dash ? "dashed" : "solid") } },
      series: [
        { label: options.at ?? "at", value: (u, v) => (v == null ? "" : options.format(v)) },
        ...series.map((s) => ({
          label: s.label, stroke: () => s.colour(), width: s.width || 1.75, dash: s.dash, spanGaps: true, points: { show: !!s.points },
          value: (u, v) => (v == null ? "" : options.value(v)),
        })),
      ],
      axes: [axis({ size: 30, ...(options.splits ? { splits: () => options.splits, filter: (u, at) => apart(u, at), values: (u, at) => at.map((v) => (v == null ? "" : number(v))) } : {}) }), axis({ size: 46, values: (u, splits) => splits.map(options.value) })],
    }, joined, body);
  };
  plots.push(build);
  build();
}

// Of values on a logarithmic axis those whose texts have room beside each other.
function apart(u, values) {
  let last = -Infinity;
  return values.map((value) => {
    const at = u.valToPos(value, "x");
    if (at - last < 30) return null;
    last = at;
    return value;
  });
}

const runColour = (number) => () => (number === 0 ? colours.accent : colours.kind[1]);
const percent = (v) => Math.round(v * 100) + "%";

// From 0, or from just below the smallest value, to a little beyond the 99th percentile.
function cdfRange(curves) {
  const far = Math.max(...curves.map((c) => c.x[c.y.findIndex((y) => y >= 0.99)] ?? 1));
  const near = Math.min(...curves.map((c) => c.x[0] ?? 0));
  return () => [near > far / 2 ? near * 0.95 : 0, far * 1.08];
}

function drawCdfs(host) {
  const common = { y: () => [0, 1], value: percent, unit: "ms", format: (v) => v.toFixed(3) + " ms" };
  for (const [key, heading] of [["iteration", "Iteration time"], ["tpot", "Time per output token"]]) {
    const series = data.runs.map((run, number) => ({ ...run.cdf[key], label: run.summary.label, colour: runColour(number), width: 2 })).filter((s) => s.x.length);
    if (series.length) plot(host, heading, series, { ...common, x: cdfRange(series) });
  }
  const series = [];
  data.runs.forEach((run, number) => Object.entries(run.cdf.forward).forEach(([name, curve], stage) => {
    if (!curve.x.length) return;
    series.push({ ...curve, label: (compared ? ["A ", "B "][number] : "") + name, colour: () => colours.slot[stage % SLOTS], dash: number ? [5, 4] : undefined });
  }));
  if (series.length && series.length <= 24) plot(host, "Forward time by stage" + (compared ? " (B dashed)" : ""), series, { ...common, x: cdfRange(series) });
}

function average(curves) {
  return curves[0].map((_, i) => curves.reduce((sum, c) => sum + c[i], 0) / curves.length);
}

function drawUtilization(host) {
  const whole = () => [0, view.total];
  const common = { x: whole, unit: "over seconds", format: (v) => v.toFixed(2) + " s" };
  const device = [], cores = [];
  data.runs.forEach((run, number) => {
    const { t, device: stages, cores: used } = run.utilization, dash = number ? [5, 4] : undefined;
    const mark = compared ? ` · ${run.summary.label}` : "";
    const entries = Object.entries(stages);
    if (!compared && entries.length > 1 && entries.length <= 16)
      entries.forEach(([name, y], stage) => device.push({ x: t, y, label: name, colour: () => colours.slot[stage % SLOTS], width: 1 }));
    if (entries.length) device.push({ x: t, y: average(entries.map((e) => e[1])), label: "all stages" + mark, colour: compared ? runColour(number) : () => colours.ink, width: 2 });
    for (const [role, colour] of [["stage", 0], ["sampler", 1], ["executor", 2]]) {
      const own = Object.entries(used).filter(([name]) => name.startsWith(role)).map((e) => e[1]);
      if (own.length) cores.push({ x: t, y: average(own).map((v) => v * own.length), label: (role === "executor" ? role : role + "s") + mark, colour: () => colours.slot[colour], dash });
    }
  });
  if (device.length) plot(host, "Device busy", device, { ...common, y: () => [0, 1], value: percent });
  if (cores.length) plot(host, "CPU cores in use", cores, { ...common, y: (u, low, high) => [0, Math.max(0.1, high * 1.1)], value: (v) => v.toFixed(2) });
}
