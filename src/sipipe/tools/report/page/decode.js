// Columns as tools/report/render.py writes them, back to typed arrays.

const data = JSON.parse(document.getElementById("data").textContent);

async function inflate(text) {
  const packed = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// `size` byte planes, lowest first, to signed integers.
async function decodeColumn({ size, data: text }, count) {
  const bytes = await inflate(text), values = new (size < 8 ? Int32Array : Float64Array)(count);
  for (let plane = size - 1; plane >= 0; plane--)
    for (let i = 0; i < count; i++) {
      const byte = bytes[plane * count + i];
      values[i] = plane === size - 1 ? (byte << 24) >> 24 : values[i] * 256 + byte; // the sign is in the highest
    }
  return values;
}

function running(steps) {
  for (let i = 1; i < steps.length; i++) steps[i] += steps[i - 1];
  return steps;
}

// A lane in seconds from the start: {start, end, what, iteration, slot, batch, tokens, reach}.
// reach[i] is the latest end among intervals 0..i, which makes overlapping intervals searchable.
async function decodeLane(lane) {
  const n = lane.count, unit = data.quantum_ns / 1e9, c = {};
  for (const name in lane.columns) c[name] = await decodeColumn(lane.columns[name], n);
  lane.columns = null; // the text is no longer needed: let it be collected
  const start = new Float64Array(n), end = new Float64Array(n), reach = new Float64Array(n);
  let at = 0, far = 0;
  for (let i = 0; i < n; i++) {
    if (c.gap) at += c.gap[i];
    start[i] = at * unit;
    end[i] = (at + c.span[i]) * unit;
    if (!c.gap) at += c.span[i];
    far = Math.max(far, end[i]);
    reach[i] = far;
  }
  return Object.assign(lane, {
    start, end, reach,
    what: Uint8Array.from(c.what), slot: c.slot, iteration: running(c.step),
    batch: c.batch, tokens: c.tokens,
  });
}

// The first index whose value in a sorted array is greater than x.
function above(array, x) {
  let low = 0, high = array.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (array[middle] > x) high = middle; else low = middle + 1;
  }
  return low;
}
