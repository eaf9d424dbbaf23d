// Drawing a lane: boxes where they can be told apart, shares per pixel column where not.

const PHASE = Object.fromEntries(data.phases.map((name, number) => [name, number]));
const SLOTS = 8, BINS = 16384;
const colours = {};
const font = (size, weight = 400) => `${weight} ${size}px system-ui, "DejaVu Sans", sans-serif`;

function readColours() {
  const style = getComputedStyle(document.documentElement);
  const get = (name) => style.getPropertyValue("--" + name).trim();
  for (const name of ["ink", "muted", "line", "grid", "card", "accent", "wait"]) colours[name] = get(name);
  colours.slot = Array.from({ length: SLOTS }, (_, s) => get("slot" + s));
  colours.kind = data.kinds.map((kind) => get(kind));
  colours.phase = data.phases.map((phase) => get(phase) || colours.wait);
  // What a category number of `category` below is painted with: slots, then kinds, then phases.
  colours.category = [...colours.slot, ...colours.kind, ...colours.phase];
}

const isWait = data.phases.map((name) => name.startsWith("wait_") || name === "gather" || name === "idle");

const isSampler = (lane) => lane.kind !== "device" && lane.group === "" && lane.name.startsWith("sampler");

// What an interval is painted with, but for boxes of a busy device, which have their slot's colour.
function category(lane, i) {
  const what = lane.what[i];
  if (lane.kind === "device") return SLOTS + data.kind_of[what];
  if (lane.group === "" && what === PHASE.sample) return lane.slot[i] % SLOTS;
  return SLOTS + data.kinds.length + what;
}

// Seconds of each category in each of `columns` equal parts of a span.
function spread(lane, from, to, columns) {
  const kinds = colours.category.length, width = (to - from) / columns, stop = above(lane.start, to);
  const sums = new Float32Array(columns * kinds);
  for (let i = above(lane.reach, from); i < stop; i++) {
    const start = lane.start[i], end = lane.end[i], kind = category(lane, i);
    const last = Math.min(columns - 1, Math.floor((end - from) / width));
    for (let column = Math.max(0, Math.floor((start - from) / width)); column <= last; column++) {
      const part = Math.min(end, from + (column + 1) * width) - Math.max(start, from + column * width);
      if (part > 0) sums[column * kinds + kind] += part;
    }
  }
  return sums;
}

// The same, of a long span without a look at each interval: from BINS parts of the run, which are kept.
function shares(lane, from, to, columns) {
  const kinds = colours.category.length, width = (to - from) / columns, size = view.total / BINS;
  if (width < size) return spread(lane, from, to, columns);
  const all = (lane.bins ??= spread(lane, 0, view.total, BINS)), sums = new Float32Array(columns * kinds);
  const first = Math.max(0, Math.floor(from / size)), last = Math.min(BINS - 1, Math.ceil(to / size));
  for (let b = first; b <= last; b++) {
    const column = Math.floor((b * size + size / 2 - from) / width);
    if (column < 0 || column >= columns) continue;
    for (let k = 0; k < kinds; k++) sums[column * kinds + k] += all[b * kinds + k];
  }
  return sums;
}

// One column per pixel, with a part for each category but waits; `whole` seconds fill it, or all
// that is in it where that is more. What is there at all is `least` pixels high.
function drawShares(ctx, sums, box, whole, least = 0) {
  const kinds = colours.category.length, phases = SLOTS + data.kinds.length;
  const order = [...Array(kinds).keys()].filter((k) => k < phases || !isWait[k - phases]);
  for (let first = 0, left = box.left; first < sums.length; first += kinds, left++) {
    let all = 0;
    for (const k of order) all += sums[first + k];
    const scale = Math.max(all, whole);
    if (!scale) continue;
    let bottom = box.top + box.height;
    for (const k of order) {
      if (!sums[first + k]) continue;
      const height = Math.max((sums[first + k] / scale) * box.height, least);
      if (height < 0.05) continue;
      ctx.fillStyle = colours.category[k];
      ctx.fillRect(left, bottom - height, 1.02, height);
      bottom -= height;
    }
  }
}

function drawBoxes(ctx, lane, box, from, to, ratio) {
  const scale = box.width / (to - from), stop = above(lane.start, to);
  ctx.font = font(11 * ratio, 600);
  ctx.textAlign = "center";
  ctx.textBaseline = "middle";
  for (let i = above(lane.reach, from); i < stop; i++) {
    const left = box.left + Math.max(0, (lane.start[i] - from) * scale);
    const right = box.left + Math.min(box.width, (lane.end[i] - from) * scale);
    const width = right - left, device = lane.kind === "device", kind = category(lane, i);
    const busy = device && kind === SLOTS;
    if (width <= 0) continue;
    ctx.fillStyle = busy ? colours.slot[lane.slot[i] % SLOTS] : colours.category[kind];
    if (device && !busy) { // a bubble: light, with a solid foot
      ctx.globalAlpha = 0.26;
      ctx.fillRect(left, box.top, width, box.height);
      ctx.globalAlpha = 1;
      ctx.fillRect(left, box.top + box.height - 4 * ratio, width, 4 * ratio);
    } else if (!device && isWait[lane.what[i]]) {
      ctx.fillRect(left, box.top + box.height - 2 * ratio, width, 2 * ratio);
    } else {
      const gap = width > 4 * ratio ? 0.5 * ratio : 0;
      // A sampler's work is short, and would be a hair: it is a mark of its own width at least.
      ctx.fillRect(left, box.top, Math.max(width - gap, (isSampler(lane) ? 2 : 0.7) * ratio), box.height);
      if (width > 34 * ratio && box.height > 12 * ratio) {
        ctx.fillStyle = "#fff";
        const name = busy || kind < SLOTS ? String(lane.iteration[i])
          : width > 62 * ratio ? data.phases[lane.what[i]] : "";
        ctx.fillText(name, left + width / 2, box.top + box.height / 2 + 0.5 * ratio);
      }
    }
  }
}

function drawLane(ctx, lane, box, ratio) {
  const { from, to } = view, columns = Math.max(1, Math.round(box.width));
  const visible = above(lane.start, to) - above(lane.reach, from);
  ctx.fillStyle = colours.grid;
  ctx.fillRect(box.left, box.top, box.width, box.height);
  if (visible <= box.width / (2.5 * ratio)) return drawBoxes(ctx, lane, box, from, to, ratio);
  // A device's parts fill the column; records are set against the column's time.
  const least = isSampler(lane) ? 3 * ratio : 0;
  drawShares(ctx, shares(lane, from, to, columns), box, lane.kind === "device" ? 0 : (to - from) / columns, least);
}
