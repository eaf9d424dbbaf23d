// Drawing a lane: boxes where they can be told apart, shares per pixel column where not.

const PHASE = Object.fromEntries(data.phases.map((name, number) => [name, number]));
const SLOTS = 8, BINS = 16384;
let colours = {};

function readColours() {
  const style = getComputedStyle(document.documentElement);
  const get = (name) => style.getPropertyValue("--" + name).trim();
  colours = { ink: get("ink"), muted: get("muted"), line: get("line"), grid: get("grid"), card: get("card"),
    accent: get("accent"), busy: get("busy"), wait: get("wait") };
  colours.slot = Array.from({ length: SLOTS }, (_, s) => get("slot" + s));
  colours.kind = data.kinds.map((kind) => get(kind));
  colours.phase = data.phases.map((phase) => get(phase) || colours.wait);
  // What a category number of `category` below is painted with: slots, then kinds, then phases.
  colours.category = [...colours.slot, ...colours.kind, ...colours.phase];
}

const isWait = data.phases.map((name) => name.startsWith("wait_") || name === "gather");

function category(lane, i) {
  const what = lane.what[i];
  if (lane.kind === "device") {
    const kind = data.kind_of[what];
    return kind === 0 ? lane.slot[i] % SLOTS : SLOTS + kind;
  }
  if (lane.group === "" && what === PHASE.sample) return lane.slot[i] % SLOTS;
  return SLOTS + data.kinds.length + what;
}

// Seconds of each category in each of BINS equal parts of the run; made when first needed.
function bins(lane, total) {
  if (lane.bins) return lane.bins;
  const width = total / BINS, kinds = colours.category.length;
  const sums = new Float32Array(BINS * kinds);
  for (let i = 0; i < lane.count; i++) spread(sums, kinds, lane.start[i], lane.end[i], category(lane, i), 0, width, BINS);
  lane.bins = sums;
  return sums;
}

// Add an interval's time to the columns that it touches.
function spread(sums, kinds, start, end, kind, from, width, columns) {
  let column = Math.max(0, Math.floor((start - from) / width));
  const last = Math.min(columns - 1, Math.floor((end - from) / width));
  for (; column <= last; column++) {
    const part = Math.min(end, from + (column + 1) * width) - Math.max(start, from + column * width);
    if (part > 0) sums[column * kinds + kind] += part;
  }
}

function shares(lane, from, to, columns, total) {
  const kinds = colours.category.length, width = (to - from) / columns;
  const sums = new Float32Array(columns * kinds);
  if (width >= total / BINS) {
    const all = bins(lane, total), size = total / BINS;
    const first = Math.max(0, Math.floor(from / size)), last = Math.min(BINS - 1, Math.ceil(to / size));
    for (let b = first; b <= last; b++) {
      const column = Math.floor((b * size + size / 2 - from) / width);
      if (column < 0 || column >= columns) continue;
      for (let k = 0; k < kinds; k++) sums[column * kinds + k] += all[b * kinds + k];
    }
  } else {
    const stop = above(lane.start, to);
    for (let i = above(lane.reach, from); i < stop; i++)
      spread(sums, kinds, lane.start[i], lane.end[i], category(lane, i), from, width, columns);
  }
  return sums;
}

function drawShares(ctx, lane, box, from, to, total) {
  const columns = Math.max(1, Math.round(box.width)), kinds = colours.category.length;
  const sums = shares(lane, from, to, columns, total);
  const device = lane.kind === "device", phases = SLOTS + data.kinds.length;
  // The slots of a device follow each other faster than pixels can tell: one colour for all of them.
  if (device) for (let column = 0; column < columns; column++)
    for (let s = 0; s < SLOTS; s++) sums[column * kinds + SLOTS] += sums[column * kinds + s];
  const order = [...Array(kinds).keys()].filter((k) => (device ? k >= SLOTS && k < phases : k < phases || !isWait[k - phases]));
  for (let column = 0; column < columns; column++) {
    let all = 0;
    for (const k of order) all += sums[column * kinds + k];
    // A device's parts fill the column; records are set against the column's time.
    const scale = device ? all : Math.max(all, (to - from) / columns);
    if (!scale) continue;
    let bottom = box.top + box.height;
    for (const k of order) {
      const height = (sums[column * kinds + k] / scale) * box.height;
      if (height < 0.05) continue;
      ctx.fillStyle = colours.category[k];
      ctx.fillRect(box.left + column, bottom - height, 1.02, height);
      bottom -= height;
    }
  }
}

function drawBoxes(ctx, lane, box, from, to, ratio) {
  const scale = box.width / (to - from), stop = above(lane.start, to);
  ctx.font = `600 ${11 * ratio}px system-ui, "DejaVu Sans", sans-serif`;
  ctx.textAlign = "center";
  ctx.textBaseline = "middle";
  for (let i = above(lane.reach, from); i < stop; i++) {
    const left = box.left + Math.max(0, (lane.start[i] - from) * scale);
    const right = box.left + Math.min(box.width, (lane.end[i] - from) * scale);
    const width = right - left, kind = category(lane, i);
    if (width <= 0) continue;
    ctx.fillStyle = colours.category[kind];
    if (lane.kind === "device" && kind >= SLOTS) { // a bubble: light, with a solid foot
      ctx.globalAlpha = 0.26;
      ctx.fillRect(left, box.top, width, box.height);
      ctx.globalAlpha = 1;
      ctx.fillRect(left, box.top + box.height - 4 * ratio, width, 4 * ratio);
    } else if (lane.kind !== "device" && isWait[lane.what[i]]) {
      ctx.fillRect(left, box.top + box.height - 2 * ratio, width, 2 * ratio);
    } else {
      const gap = width > 4 * ratio ? 0.5 * ratio : 0;
      ctx.fillRect(left, box.top, Math.max(width - gap, 0.7 * ratio), box.height);
      if (width > 34 * ratio && box.height > 12 * ratio) {
        ctx.fillStyle = "#fff";
        const name = lane.kind === "device" || kind < SLOTS ? String(lane.iteration[i])
          : width > 62 * ratio ? data.phases[lane.what[i]] : "";
        ctx.fillText(name, left + width / 2, box.top + box.height / 2 + 0.5 * ratio);
      }
    }
  }
}

function drawLane(ctx, lane, box, from, to, total, ratio) {
  const visible = above(lane.start, to) - above(lane.reach, from);
  ctx.fillStyle = colours.grid;
  ctx.fillRect(box.left, box.top, box.width, box.height);
  if (visible > box.width / (2.5 * ratio)) drawShares(ctx, lane, box, from, to, total);
  else drawBoxes(ctx, lane, box, from, to, ratio);
}
