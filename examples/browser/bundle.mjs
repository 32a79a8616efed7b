// Reads a .talaria bundle: a zip of plainly stored members, a manifest first, a SHA-256 for each. Nothing to install.

const HEAD = 30;

/** The bundle in `bytes` (Uint8Array); throws an Error that says what is wrong with it. */
export async function readBundle(bytes) {
  const members = unpack(bytes);
  const manifest = JSON.parse(new TextDecoder().decode(members.get("manifest.json") ?? fail("holds no manifest")));
  if (manifest.format !== "talaria-bundle" || manifest.version !== 1) fail("is not a bundle of version 1");
  for (const [name, { sha256 }] of Object.entries(manifest.files)) {
    const content = members.get(name) ?? fail(`lacks ${name}`);
    if ((await digest(content)) !== sha256) fail(`holds another ${name} than its manifest names`);
  }
  const { shape, windows = null } = manifest.input;
  const sizes = [...shape, ...(windows === null ? [] : [windows.stride])];
  if (!sizes.every((size) => Number.isInteger(size) && size > 0)) fail(`takes windows of no size (${sizes})`);
  const inside = manifest.variants.filter((row) => row.file !== null);
  const row = (name) => inside.find((one) => one.name === name) ?? fail(`holds no variant ${name}`);
  return {
    manifest,
    shape,
    windows, // { size, stride } where the model cuts one recording by itself
    labels: manifest.output.labels,
    task: manifest.output.task ?? "classification", // what the outputs are: docs/export.md
    variants: inside.map((one) => one.name),
    model: (name = manifest.default) => members.get(row(name).file),
  };
}

/**
 * What the model takes, from plain numbers (Float32Array): a batch of windows, or one recording of any length, step by
 * step, where the bundle cuts it. Gives { dims, count, window(i) }: the tensor's shape, the number of answers, and one
 * window, channel by channel, with the step at which it begins.
 */
export function inputs({ shape, windows }, values) {
  const size = shape.reduce((a, b) => a * b, 1);
  if (!values.every(Number.isFinite)) fail("takes numbers, and not NaN or infinity; drop or repair that input");
  if (windows === null) {
    const count = values.length / size;
    if (!Number.isInteger(count) || count < 1) fail(`takes windows of ${size} numbers, here are ${values.length}`);
    return { dims: [count, ...shape], count, window: (i) => ({ begin: null, values: values.slice(i * size, (i + 1) * size) }) };
  }
  const [channels, steps] = shape;
  const time = values.length / channels;
  if (!Number.isInteger(time) || time < steps) fail(`takes recordings of ${channels} channels and at least ${steps} steps`);
  const window = (i) => {
    const begin = i * windows.stride;
    const cut = Float32Array.from({ length: size }, (_, k) => values[(begin + (k % steps)) * channels + Math.floor(k / steps)]);
    return { begin, values: cut };
  };
  return { dims: [time, channels], count: Math.floor((time - steps) / windows.stride) + 1, window };
}

/** Probabilities of one row of logits. */
export function softmax(logits) {
  const top = Math.max(...logits);
  const powers = Array.from(logits, (value) => Math.exp(value - top));
  const sum = powers.reduce((a, b) => a + b, 0);
  return powers.map((power) => power / sum);
}

function unpack(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const members = new Map();
  let at = 0;
  while (at + HEAD <= bytes.length && view.getUint32(at, true) === 0x04034b50) {
    const size = view.getUint32(at + 18, true);
    const start = at + HEAD + view.getUint16(at + 26, true) + view.getUint16(at + 28, true);
    if (view.getUint16(at + 8, true) !== 0 || start + size > bytes.length) fail("is damaged");
    const name = new TextDecoder().decode(bytes.subarray(at + HEAD, at + HEAD + view.getUint16(at + 26, true)));
    members.set(name, bytes.slice(start, start + size));
    at = start + size;
  }
  return members;
}

async function digest(content) {
  const { subtle } = globalThis.crypto ?? (await import("node:crypto")).webcrypto; // Node before 19 has no global one
  const hash = await subtle.digest("SHA-256", content);
  return Array.from(new Uint8Array(hash), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

function fail(why) {
  throw new Error(`the bundle ${why}`);
}
