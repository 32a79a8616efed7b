// Writes a .talaria bundle in the page: a template's bytes with personal weights in their places, a SHA-256 for each
// member, and the zip archive in the one form that a reader takes.

const encoder = new TextEncoder();

/**
 * The bundle (Uint8Array). `template`: model (the ONNX file's bytes), places ({name: [offset, length]}) and manifest;
 * `state`: the personal weights; `outputs`: {shape, data}, the model's answers to the template's parity inputs.
 */
export async function makeBundle({ model, places, manifest }, state, outputs, card) {
  const filled = model.slice();
  for (const [name, [offset, length]] of Object.entries(places)) {
    const { data } = state[name];
    if (data.byteLength !== length) throw new Error(`${name} has ${data.byteLength} bytes, its place has ${length}`);
    filled.set(new Uint8Array(data.buffer, data.byteOffset, data.byteLength), offset);
  }
  const members = { "models/fp32.onnx": filled, "parity/outputs.npy": npy(outputs) };
  const files = {};
  for (const name of Object.keys(members).sort())
    files[name] = { bytes: members[name].length, sha256: await digest(members[name]) };
  const most = outputs.data.reduce((top, value) => Math.max(top, Math.abs(value)), 0);
  const whole = { ...manifest, created: new Date().toISOString(), card: { ...manifest.card, ...card }, files };
  whole.parity = { ...manifest.parity, tolerance: Math.max(1e-4, 1e-5 * most) };
  whole.variants[0].bytes = filled.length;
  return pack({ "manifest.json": encoder.encode(JSON.stringify(whole, null, 1)), ...members });
}

/** float32 in numpy's own form, version 1.0. */
function npy({ shape, data }) {
  const tuple = `(${shape.join(", ")}${shape.length === 1 ? "," : ""})`;
  const text = `{'descr': '<f4', 'fortran_order': False, 'shape': ${tuple}, }`;
  const length = Math.ceil((10 + text.length + 1) / 64) * 64 - 10;
  const head = Uint8Array.of(0x93, ...encoder.encode("NUMPY"), 1, 0, length & 255, length >> 8);
  return joined([head, encoder.encode(`${text.padEnd(length - 1)}\n`), new Uint8Array(Float32Array.from(data).buffer)]);
}

/** The archive of the members, in their order: stored, with the date that is the format's zero. */
function pack(members) {
  const body = [];
  const directory = [];
  let offset = 0;
  for (const [name, content] of Object.entries(members)) {
    const raw = encoder.encode(name);
    const common = [[20, 2], [0, 2], [0, 2], [0, 2], [0x21, 2], [crc32(content), 4], [content.length, 4], [content.length, 4], [raw.length, 2], [0, 2]]; // prettier-ignore
    const head = joined([numbers([[0x04034b50, 4], ...common]), raw]);
    const attributes = 0o100644 * 65536;
    directory.push(numbers([[0x02014b50, 4], [0x0314, 2], ...common, [0, 2], [0, 2], [0, 2], [attributes, 4], [offset, 4]]), raw);
    body.push(head, content);
    offset += head.length + content.length;
  }
  const size = directory.reduce((sum, part) => sum + part.length, 0);
  const count = Object.keys(members).length;
  const end = numbers([[0x06054b50, 4], [0, 2], [0, 2], [count, 2], [count, 2], [size, 4], [offset, 4], [0, 2]]);
  return joined([...body, ...directory, end]);
}

function numbers(fields) {
  const out = new Uint8Array(fields.reduce((sum, [, width]) => sum + width, 0));
  const view = new DataView(out.buffer);
  let at = 0;
  for (const [value, width] of fields) {
    if (width === 2) view.setUint16(at, value, true);
    else view.setUint32(at, value, true);
    at += width;
  }
  return out;
}

function joined(parts) {
  const out = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
  let at = 0;
  for (const part of parts) {
    out.set(part, at);
    at += part.length;
  }
  return out;
}

const TABLE = Uint32Array.from({ length: 256 }, (_, byte) => {
  let value = byte;
  for (let bit = 0; bit < 8; bit++) value = value & 1 ? (value >>> 1) ^ 0xedb88320 : value >>> 1;
  return value;
});

function crc32(data) {
  let sum = 0xffffffff;
  for (const byte of data) sum = (sum >>> 8) ^ TABLE[(sum ^ byte) & 255];
  return (sum ^ 0xffffffff) >>> 0;
}

async function digest(content) {
  const hash = await crypto.subtle.digest("SHA-256", content);
  return Array.from(new Uint8Array(hash), (byte) => byte.toString(16).padStart(2, "0")).join("");
}
