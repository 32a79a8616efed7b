// Named tensors as bytes: strict safetensors, and updates in the codecs of docs/PROTOCOL.md. Runs in Node and in a page.
// A tensor is {dtype, shape, data}: data is a typed array in the machine's (little-endian) order.

const TYPES = {
  F64: Float64Array,
  I64: BigInt64Array,
  F32: Float32Array,
  I32: Int32Array,
  F16: Uint16Array,
  BF16: Uint16Array,
  I16: Int16Array,
  I8: Int8Array,
  U8: Uint8Array,
  BOOL: Uint8Array,
};
const MAX_HEADER = 2 ** 20;
const MAX_NAME = 200;
export const product = (shape) => shape.reduce((a, b) => a * b, 1);
export const isFloat = (tensor) => tensor.dtype === "F32" || tensor.dtype === "F64" || tensor.dtype === "F16";
export const float32 = (shape, data) => ({ dtype: "F32", shape, data: Float32Array.from(data) });

const byCodePoint = (a, b) => {
  const [x, y] = [[...a], [...b]];
  for (let i = 0; i < Math.min(x.length, y.length); i++) if (x[i] !== y[i]) return x[i].codePointAt(0) - y[i].codePointAt(0);
  return x.length - y.length;
};

/** A safetensors file: the same tensors give the same bytes as Talaria's own writer. `metadata`: texts by name. */
export function pack(tensors, metadata = {}) {
  const size = (name) => TYPES[tensors[name].dtype].BYTES_PER_ELEMENT;
  const names = Object.keys(tensors).sort((a, b) => size(b) - size(a) || byCodePoint(a, b));
  const entries = Object.keys(metadata).length ? [["__metadata__", metadata]] : [];
  let end = 0;
  for (const name of names) {
    const begin = end;
    end += size(name) * product(tensors[name].shape);
    entries.push([name, { dtype: tensors[name].dtype, shape: tensors[name].shape, data_offsets: [begin, end] }]);
  }
  // An object would put names that are numbers before all others.
  const header = entries.map((entry) => entry.map((one) => JSON.stringify(one)).join(":"));
  const text = new TextEncoder().encode(`{${header}}`);
  const padded = Math.ceil(text.length / 8) * 8;
  if (padded > MAX_HEADER) throw new Error(`${names.length} tensors need too long a header`);
  const out = new Uint8Array(8 + padded + end).fill(32, 8, 8 + padded);
  new DataView(out.buffer).setBigUint64(0, BigInt(padded), true);
  out.set(text, 8);
  let at = 8 + padded;
  for (const { data } of names.map((name) => tensors[name])) {
    out.set(new Uint8Array(data.buffer, data.byteOffset, data.byteLength), at);
    at += data.byteLength;
  }
  return out;
}

const isTable = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

/** `{tensors, metadata}` of a safetensors file; an error for anything that is not exactly one well-formed file. */
export function unpack(file) {
  const refuse = (why) => {
    throw new Error(`tensors: ${why}`);
  };
  if (file.length < 8) refuse("too few bytes");
  const length = Number(new DataView(file.buffer, file.byteOffset).getBigUint64(0, true));
  if (length > MAX_HEADER || 8 + length > file.length) refuse(`a header of ${length} bytes does not fit`);
  let text, header;
  try {
    text = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(file.subarray(8, 8 + length));
    header = JSON.parse(text);
  } catch {
    refuse("the header is no JSON");
  }
  if (!isTable(header)) refuse("the header is no table");
  const { __metadata__: metadata = {}, ...entries } = header;
  if (!isTable(metadata) || !Object.values(metadata).every((value) => typeof value === "string"))
    refuse("the metadata is no table of texts");
  // A parser keeps the last of equal names, and makes 8 of 8.0: the text itself tells.
  let names = 0;
  const rest = text.replace(/"[^"\\]*(?:\\.[^"\\]*)*"(\s*:)?/g, (_, colon) => ((names += colon ? 1 : 0), ""));
  const each = 3 * Object.keys(entries).length;
  if (names !== Object.keys(header).length + Object.keys(metadata).length + each) refuse("a name stands twice, or one too many");
  if (/[.eE]/.test(rest)) refuse("a number in the header is not whole");
  const tensors = {};
  const spans = [];
  for (const [name, entry] of Object.entries(entries)) {
    if (name in {} || !name || [...name].length > MAX_NAME) refuse(`the name ${name.slice(0, 80)} is not allowed`);
    if (!isTable(entry)) refuse(`${name.slice(0, 80)} has no dtype, shape and data_offsets`);
    const { dtype, shape, data_offsets: at } = entry;
    const Type = typeof dtype === "string" && Object.hasOwn(TYPES, dtype) ? TYPES[dtype] : refuse(`${name.slice(0, 80)}: its dtype is unknown`);
    const sizes = Array.isArray(shape) && shape.length <= 8 && shape.every((n) => Number.isInteger(n) && n >= 0);
    const places = Array.isArray(at) && at.length === 2 && at.every((n) => Number.isInteger(n) && n >= 0);
    if (!sizes || !places || at[1] - at[0] !== product(shape) * Type.BYTES_PER_ELEMENT || 8 + length + at[1] > file.length)
      refuse(`${name.slice(0, 80)}: its bytes do not hold its shape`);
    spans.push([...at]);
    tensors[name] = { dtype, shape, data: new Type(file.slice(8 + length + at[0], 8 + length + at[1]).buffer) };
    if (dtype === "BOOL" && tensors[name].data.some((value) => value > 1)) refuse(`${name.slice(0, 80)}: a truth value is neither 0 nor 1`);
  }
  let end = 0;
  for (const [begin, stop] of spans.sort((a, b) => a[0] - b[0] || a[1] - b[1])) {
    if (begin !== end) refuse("a hole or an overlap between tensors");
    end = stop;
  }
  if (8 + length + end !== file.length) refuse("bytes follow the last tensor");
  return { tensors, metadata };
}

// ---- codecs ------------------------------------------------------------------------------------------------------

const bitsOf = (value) => new Uint32Array(Float32Array.from(value).buffer);

function bfloat16(values) {
  return Uint16Array.from(bitsOf(values), (bits) => (bits + ((bits >>> 16) & 1) + 0x7fff) >>> 16);
}

const fromBfloat16 = (halves) => new Float32Array(Uint32Array.from(halves, (half) => half << 16).buffer);

const evenly = (value) => {
  const low = Math.floor(value);
  const rest = value - low;
  return rest < 0.5 || (rest === 0.5 && low % 2 === 0) ? low : low + 1;
};

const TINY = 2 ** -126;

function int8({ shape, data }) {
  const rows = shape.length > 1 ? shape[0] : 1;
  const each = data.length / rows;
  const scale = new Float32Array(rows);
  const levels = new Int8Array(data.length);
  for (let row = 0; row < rows; row++) {
    let most = 0;
    for (let i = row * each; i < (row + 1) * each; i++) most = Math.max(most, Math.abs(data[i]));
    scale[row] = most / 127;
    if (!(scale[row] > TINY)) scale[row] = 1;
    for (let i = row * each; i < (row + 1) * each; i++)
      levels[i] = Math.max(-127, Math.min(127, evenly(Math.fround(data[i] / scale[row]))));
  }
  return [levels, scale];
}

/** Codecs of this device; what a coarse one leaves out is fed back into the next update. */
export const CODECS = ["raw", "bf16", "int8"];
export const isCoarse = (codec) => codec === "int8";

/** The planes of float tensors; `sent` is what the other side reads of them. */
export function toPlanes(name, tensor, codec) {
  if (!isFloat(tensor)) return { planes: { [name]: tensor }, sent: tensor };
  if (!tensor.data.every(Number.isFinite)) throw new Error(`tensor ${name} holds NaN or infinity; it cannot be sent`);
  if (codec === "raw" || tensor.data.length === 0) return { planes: { [name]: tensor }, sent: tensor };
  const { shape } = tensor;
  if (codec === "bf16") {
    const half = bfloat16(tensor.data);
    const planes = { [`${name}|b`]: { dtype: "BF16", shape, data: half } };
    return { planes, sent: { dtype: "F32", shape, data: fromBfloat16(half) } };
  }
  const [levels, scale] = int8(tensor);
  const each = levels.length / scale.length;
  const data = Float32Array.from(levels, (level, i) => level * scale[Math.floor(i / each)]);
  const planes = {
    [`${name}|q`]: { dtype: "I8", shape, data: levels },
    [`${name}|s`]: { dtype: "F32", shape: [scale.length], data: scale },
  };
  return { planes, sent: { dtype: "F32", shape, data } };
}

function fromFloat16(halves) {
  return Float32Array.from(halves, (half) => {
    const sign = half & 0x8000 ? -1 : 1;
    const power = (half >>> 10) & 31;
    const rest = half & 0x3ff;
    if (power === 31) return rest ? NaN : sign * Infinity;
    return sign * (power ? (1 + rest / 1024) * 2 ** (power - 15) : rest * 2 ** -24);
  });
}

/** The tensors of a global model's planes. */
export function fromPlanes(planes) {
  const found = {};
  const single = (name, tensor, data) => (found[name] = { dtype: "F32", shape: tensor.shape, data });
  for (const [plane, tensor] of Object.entries(planes)) {
    const [, name, suffix] = /^(.*?)(\|[hbqs])?$/s.exec(plane);
    if (suffix === "|h") single(name, tensor, fromFloat16(tensor.data));
    else if (suffix === "|b") single(name, tensor, fromBfloat16(tensor.data));
    else if (suffix === "|q") {
      const scale = planes[`${name}|s`]?.data;
      if (!scale) throw new Error(`tensor ${name} has levels without scales`);
      const each = tensor.data.length / scale.length;
      single(name, tensor, Float32Array.from(tensor.data, (level, i) => level * scale[Math.floor(i / each)]));
    } else if (!suffix) found[name] = tensor;
  }
  return found;
}

const minus = (a, b) => ({ ...a, data: a.data.map((value, i) => value - b.data[i]) });

/** New less old values. */
export const differences = (now, before) =>
  Object.fromEntries(Object.entries(now).map(([name, value]) => [name, minus(value, before[name])]));

const added = (a, b) => ({ ...a, data: a.data.map((value, i) => value + b.data[i]) });
const isStatistic = (name) => name.endsWith("running_mean") || name.endsWith("running_var");

/** What `left`, of the update before, adds to this one. */
export const compensated = (tensors, left) =>
  Object.fromEntries(Object.entries(tensors).map(([name, value]) => [name, left[name] ? added(value, left[name]) : value]));

/** A number as Python's JSON writes it. */
export function pythonFloat(value) {
  if (Number.isInteger(value) && Math.abs(value) < 1e16) return `${Object.is(value, -0) ? "-0" : value}.0`;
  const [digits, power] = String(value).split("e");
  const small = value !== 0 && Math.abs(value) < 1e-4;
  if (power === undefined && !small && Math.abs(value) < 1e16) return digits;
  const [mantissa, exponent] = value.toExponential().split("e");
  return `${mantissa}e${exponent[0]}${exponent.slice(1).padStart(2, "0")}`;
}

const ascii = (text) =>
  JSON.stringify(text).replace(/[\u007f-\uffff]/g, (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`);

/**
 * An update as bytes, and what its codec left out of each trained tensor. `facts`: client, weight, baseVersion, kind,
 * metrics.
 */
export function encodeUpdate(tensors, { client, weight, baseVersion, kind, metrics = {} }, codec) {
  const planes = {};
  const left = {};
  for (const [name, tensor] of Object.entries(tensors)) {
    const made = toPlanes(name, tensor, isStatistic(name) ? "raw" : codec);
    Object.assign(planes, made.planes);
    if (isFloat(tensor) && !isStatistic(name)) left[name] = minus(tensor, made.sent);
  }
  const numbers = Object.keys(metrics).sort(byCodePoint).map((name) => `${ascii(name)}:${pythonFloat(metrics[name])}`);
  const about =
    `{"base_version":${baseVersion},"client":${ascii(client)},"kind":${ascii(kind)},"mask":null,` +
    `"metrics":{${numbers.join()}},"v":2,"weight":${pythonFloat(weight)}}`;
  return { data: pack(planes, { talaria: about }), left };
}
