// What `sipipe bench` measured: each figure over the load that varies, a line of each engine.

const $ = (id) => document.getElementById(id);
const AXES = { rate: "requests/s sent", prompt: "tokens of a prompt", requests: "requests" };
const CHARTS = [
  ["Output tokens", "tokens/s", ["tok/s"]],
  ["Goodput: requests within all limits", "requests/s", ["goodput/s"]],
  ["Time to the first token, p99 dashed", "ms", ["TTFT p50", "TTFT p99"]],
  ["Time per output token, p99 dashed", "ms", ["TPOT p50", "TPOT p99"]],
];
const parsed = (text) => parseFloat(String(text).replaceAll(",", "")); // of a median with its range the median
const told = (row, key) => (key === "rate" && row.rate == null ? "at once" : row[key] ?? "");
const columns = Object.keys(Object.assign({}, ...data.rows)).filter((key) => data.rows.some((row) => row[key] != null));
const over = Object.keys(AXES).find((key) => new Set(data.rows.map((row) => row[key]).filter((v) => v != null)).size > 1) ?? "requests";
const beside = ["sampling", ...Object.keys(AXES)].filter((key) => key !== over && columns.includes(key));
const engines = [...new Set(data.rows.map((row) => row.engine))];

function lines(rows, key) {
  return engines.map((engine, slot) => {
    const own = rows.filter((row) => row.engine === engine && row[over] != null && row[key] != null).sort((a, b) => a[over] - b[over]);
    return {
      x: own.map((row) => row[over]), y: own.map((row) => parsed(row[key])), label: engine + (/p99/.test(key) ? " p99" : ""),
      colour: () => colours.slot[slot % SLOTS], width: 2, points: true, dash: /p99/.test(key) ? [5, 4] : undefined,
    };
  }).filter((line) => line.x.length);
}

function drawLoads(host) {
  const named = (row) => beside.map((key) => `${told(row, key)} ${AXES[key] ?? ""}`.trim()).join(", ");
  for (const name of new Set(data.rows.map(named))) {
    const rows = data.rows.filter((row) => named(row) === name);
    const charts = element("div", { className: "charts" });
    host.append(element("section", {}, element("h2", { textContent: `${name}; over ${AXES[over]}` }), charts));
    for (const [heading, unit, keys] of CHARTS) {
      const series = keys.flatMap((key) => lines(rows, key)), far = Math.max(...series.flatMap((line) => line.x));
      const common = { unit, value: (v) => number(v), format: (v) => `${number(v)}`, at: AXES[over], y: (u, low, high) => [0, high * 1.1 || 1] };
      const loads = [...new Set(series.flatMap((line) => line.x))].sort((a, b) => a - b);
      // Loads are doubled rather than counted up: on a linear axis the small ones would lie on one another.
      const log = loads.length > 2 && loads[0] > 0 && loads.at(-1) / loads[0] >= 4;
      const scale = log ? { log: true, splits: loads, x: () => [loads[0] / 1.2, far * 1.2] } : { x: () => [0, far * 1.05] };
      if (series.length) plot(charts, heading, series, { ...common, ...scale });
    }
    charts.style.setProperty("--columns", charts.children.length === 3 ? 3 : 2);
  }
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  readColours();
  for (const build of plots) build();
}

const dark = matchMedia("(prefers-color-scheme: dark)");
const wanted = /[?&]theme=(dark|light)/.exec(location.search)?.[1];
setTheme(wanted || (dark.matches ? "dark" : "light"));
dark.addEventListener("change", () => setTheme(dark.matches ? "dark" : "light"));
$("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
window.addEventListener("resize", () => { for (const build of plots) build(); });
const { machine } = data;
const model = data.model?.startsWith("/") ? data.model.split("/").pop() : data.model;
$("model").textContent = model ?? "";
const versions = [machine.vllm && `vLLM ${machine.vllm}`, machine.sipipe && `SiPipe ${machine.sipipe}`, machine.torch && `torch ${machine.torch}`];
$("what").textContent = [...versions, ...(machine.gpus ?? []), machine.cpu && `${machine.cpu}, ${machine.cores} cores`, machine.date, data.title, data.note].filter(Boolean).join(" · ");
if (data.answers?.length) {
  $("answers").hidden = false;
  $("answers").append(...data.answers.map((textContent) => element("p", { textContent })));
}
$("foot").textContent = `SiPipe ${data.version} · ${data.command}`;
drawLoads($("loads"));
for (const build of plots) build(); // at the widths that they have beside each other
$("figures").append(table(columns.map((name) => ({ name, text: ["sampling", "engine", "cores"].includes(name), cell: (row) => String(told(row, name)) })), data.rows));
window.sipipe = { ready: Promise.resolve() }; // for scripts and tests, as the report's
