// Bytes on the wire, as docs/PROTOCOL.md has them: frames, messages, topics, bitmaps and chunks. Knows no round.
import { createHash, createPrivateKey, createPublicKey, sign as signWith, verify as verifyWith } from "node:crypto";
import { crc32 } from "node:zlib";
import { encode } from "@msgpack/msgpack";

export const VERSION = 3;
export const MAX_HEADER = 1024;
export const MAX_PAYLOAD = 1024 * 1024; // of a chunk
const MAX_MESSAGE = 120 * 1024;
export const MAX_CHUNKS = 3600;
const ROOM = 1280; // bytes of a message beside what it carries
const LEAST = 4096; // that a broker must take as one message
const MAGIC = Buffer.from("FLF1");
const OVERHEAD = MAGIC.length + 2 + 4;
const DOMAIN = Buffer.from("talaria/frame/1\0");
const LARGEST = 2 ** 53;

/** What came from outside is not what it should be: it is dropped with a word, and changes nothing. */
export class WireError extends Error {}

export const sha256 = (data) => createHash("sha256").update(data).digest();
export const transferOf = (digest) => Buffer.from(digest).toString("hex").slice(0, 16);

// ---- fields, their types and bounds ------------------------------------------------------------------------------

const whole = (low = 0, high = LARGEST) => (value) => Number.isInteger(value) && value >= low && value <= high;
const bytes = (low, high) => (value) => value instanceof Uint8Array && value.length >= low && value.length <= high;
const text = (most = 300, among) => (value) =>
  typeof value === "string" && [...value].length <= most && (!among || among.includes(value));
const flag = (value) => typeof value === "boolean";
const seconds = (value) => typeof value === "number" && value >= 0 && value <= 1e9;

const MAX_TRANSFER = 2 ** 32;
const parcel = {
  size: whole(1, MAX_TRANSFER),
  chunk: whole(1, MAX_PAYLOAD),
  sha256: bytes(32, 32),
  hashes: bytes(32, 32 * MAX_CHUNKS),
  nonce: bytes(16, 16),
};
const part = { attempt: whole(), step: whole(0, 4), part: whole(0, 63), parts: whole(1, 64), data: bytes(1, 64 * 1024) };
const window = { attempt: whole(), xfer: text(32), bitmap: bytes(1, MAX_CHUNKS / 8), credit: whole(1, 64) };

/** Each message's fields, in the order in which they are written. */
export const MESSAGES = {
  co: {
    online: flag,
    key: bytes(0, 32),
    chunk: whole(1, MAX_PAYLOAD),
    credit: whole(1, 64),
    max_update: whole(1, MAX_TRANSFER),
    retry: seconds,
    spec: bytes(0, 64 * 1024),
  },
  device: { online: flag, key: bytes(0, 32), profile: bytes(0, 4096), process: bytes(0, 16) },
  model: { ...parcel, version: whole() },
  compact: { ...parcel, of: bytes(32, 32) },
  kit: parcel,
  nokit: { reason: text() },
  offer: { ...parcel, attempt: whole(), base_version: whole(), base_digest: bytes(32, 32) },
  work: {
    attempt: whole(),
    version: whole(),
    model_digest: bytes(32, 32),
    seconds,
    spec: bytes(0, 64 * 1024),
  },
  accept: { attempt: whole() },
  decline: { attempt: whole(), reason: text() },
  grant: window,
  need: window,
  receipt: {
    attempt: whole(),
    sha256: bytes(32, 32),
    outcome: text(16, ["stored", "late", "rejected", "equivocation"]),
    reason: text(),
  },
  abort: { attempt: whole(), reason: text() },
  rebirth: { above: whole() },
  want: { model_digest: bytes(32, 32), bitmap: bytes(0, MAX_CHUNKS / 8) },
  wantcompact: { model_digest: bytes(32, 32), mask: bytes(1, 64 * 1024) },
  wantchanges: { model_digest: bytes(32, 32), mask: bytes(0, 64 * 1024), base: bytes(32, 32), held: bytes(32, 32) },
  wantkit: { sha256: bytes(0, 32), bitmap: bytes(0, MAX_CHUNKS / 8) },
  word: part, // of a secure round, as the next two
  told: part,
  heard: { attempt: whole(), step: whole(0, 4) },
  error: { attempt: whole(), reason: text() },
  goodbye: { version: whole() },
  leave: {},
  farewell: {},
  notice: { text: text() },
};

function checked(type, values) {
  const wanted = Object.hasOwn(MESSAGES, type) && MESSAGES[type];
  if (!wanted) throw new WireError(`message type ${JSON.stringify(type)} is unknown`);
  if (Object.keys(values).length !== Object.keys(wanted).length)
    throw new WireError(`message ${type}: needs the fields ${Object.keys(wanted)}`);
  for (const [name, good] of Object.entries(wanted)) {
    if (!Object.hasOwn(values, name) || !good(values[name]))
      throw new WireError(`message ${type}: its ${name} is missing or out of bounds`);
  }
  if (wanted.hashes && values.hashes.length !== 32 * Math.ceil(values.size / values.chunk))
    throw new WireError(`message ${type}: its hashes do not fit size and chunk`);
  return values;
}

/** The payload of a frame. */
export function encodeMessage(type, values) {
  checked(type, values);
  return encoded(Object.keys(MESSAGES[type]).map((name) => [name, values[name]]));
}

/** The fields of the message in a frame. */
export function decodeMessage({ header, payload }) {
  if (payload.length > MAX_MESSAGE) throw new WireError(`message: ${payload.length} bytes; refused unread`);
  return checked(header.type, unpacked(payload, "message", (name) => MESSAGES[header.type]?.[name] === seconds));
}

/** A map, each value in its shortest form; 2^53 itself a library takes for no whole number, unless it is a bigint. */
function encoded(fields) {
  const whole = (value) => (Number.isInteger(value) && value >= 2 ** 32 ? BigInt(value) : value);
  return Buffer.from(encode(Object.fromEntries(fields.map(([name, value]) => [name, whole(value)])), { useBigInt64: true }));
}

const utf8 = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

/**
 * What a msgpack map says, text keys and plain values alone: whole numbers (beyond 2^53 as bigint, as a double would round
 * them), text, bytes, truth values, and floats where `timed(name)`. A library reads what is no UTF-8 as some other text, and
 * floats as whole numbers.
 */
function unpacked(data, what, timed = () => false) {
  let at = 0;
  const refuse = (why) => {
    throw new WireError(`${what}: not valid msgpack (${why})`);
  };
  const take = (count) => (at + count > data.length ? refuse("cut short") : data.subarray(at, (at += count)));
  const number = (count, signed = false) => {
    const bits = BigInt(`0x${take(count).toString("hex")}`);
    const value = signed ? BigInt.asIntN(8 * count, bits) : bits;
    return value >= 0n && value <= BigInt(LARGEST) ? Number(value) : value;
  };
  const words = (count) => {
    try {
      return utf8.decode(take(count));
    } catch {
      return refuse("text that is no UTF-8");
    }
  };
  const value = (name) => {
    const form = number(1);
    if (form < 0x80) return form;
    if (form >= 0xa0 && form <= 0xbf) return words(form - 0xa0);
    if (form === 0xc2 || form === 0xc3) return form === 0xc3;
    if (form >= 0xc4 && form <= 0xc6) return take(number(2 ** (form - 0xc4)));
    if (timed(name) && form === 0xca) return take(4).readFloatBE();
    if (timed(name) && form === 0xcb) return take(8).readDoubleBE();
    if (form >= 0xcc && form <= 0xd3) return number(2 ** ((form - 0xcc) % 4), form >= 0xd0);
    if (form >= 0xd9 && form <= 0xdb) return words(number(2 ** (form - 0xd9)));
    return refuse(`0x${form.toString(16)} stands for ${name}`);
  };
  const form = number(1);
  const count = form >> 4 === 8 ? form & 15 : form === 0xde ? number(2) : form === 0xdf ? number(4) : refuse("no map");
  const found = new Map();
  for (let i = 0; i < count; i++) {
    const name = value("a key");
    if (typeof name !== "string") refuse("a key that is no text");
    found.set(name, value(name));
  }
  if (at !== data.length) refuse("something follows");
  return Object.fromEntries(found);
}

// ---- frames ------------------------------------------------------------------------------------------------------

const KEYS = {
  t: ["type", text(16)],
  f: ["fleet", text(36)],
  d: ["device", text(36)],
  b: ["boot", whole()],
  s: ["seq", whole()],
  a: ["attempt", whole()],
  x: ["xfer", text(32)],
  i: ["idx", whole()],
  o: ["off", whole()],
  k: ["sig", bytes(64, 64)],
};
const EMPTY = { device: "", boot: 0, seq: 0, attempt: 0, xfer: "", idx: 0, off: 0 };

/** The header in its one form, over which the signature goes. */
function packed(header, length, signature) {
  const fields = [["v", VERSION], ["l", length]]; // prettier-ignore
  for (const [short, [name, good]] of Object.entries(KEYS)) {
    const value = name === "sig" ? signature : header[name];
    if (!value && short !== "t" && short !== "f") continue;
    if (!good(value)) throw new WireError(`frame: header ${name} is out of bounds`);
    fields.push([short, value]);
  }
  return encoded(fields);
}

/** One frame. `signer` (see `signerOf`) signs it. */
export function encodeFrame(header, payload, signer) {
  if (payload.length > MAX_PAYLOAD) throw new WireError(`frame: payload of ${payload.length} bytes; send it in chunks`);
  const plain = packed(header, payload.length);
  const head = signer ? packed(header, payload.length, signer.sign(Buffer.concat([plain, payload]))) : plain;
  if (head.length > MAX_HEADER) throw new WireError("frame: the header is too long; shorten the names");
  const size = Buffer.alloc(2);
  size.writeUInt16LE(head.length);
  const whole = Buffer.concat([MAGIC, size, head, payload]);
  const sum = Buffer.alloc(4);
  sum.writeUInt32LE(crc32(whole));
  return Buffer.concat([whole, sum]);
}

/** The frame that `data` holds, nothing before it and nothing after. */
export function decodeFrame(data) {
  if (data.length > OVERHEAD + MAX_HEADER + MAX_PAYLOAD) throw new WireError("frame: too large; refused unread");
  if (data.length < OVERHEAD || !data.subarray(0, 4).equals(MAGIC)) throw new WireError("frame: no Talaria frame");
  const size = data.readUInt16LE(4);
  if (size > MAX_HEADER || OVERHEAD + size > data.length) throw new WireError("frame: its header does not fit");
  if (data.readUInt32LE(data.length - 4) !== crc32(data.subarray(0, -4)))
    throw new WireError("frame: the checksum does not match");
  const fields = unpacked(data.subarray(6, 6 + size), "frame header");
  const { v, l, ...rest } = fields;
  const payload = data.subarray(6 + size, -4);
  if (v !== VERSION) throw new WireError(`frame: version ${v} is unknown; this side speaks ${VERSION}`);
  if (l !== payload.length) throw new WireError("frame: its payload has another length than it declares");
  const header = { ...EMPTY };
  for (const [short, value] of Object.entries(rest)) {
    const [name, good] = Object.hasOwn(KEYS, short) ? KEYS[short] : [];
    if (!name || !(good(value) || (name === "sig" && bytes(0, 0)(value))))
      throw new WireError(`frame: header ${short.slice(0, 20)} is unknown or out of bounds`);
    header[name] = value;
  }
  if (!("type" in header) || !("fleet" in header)) throw new WireError("frame: the header has no type or fleet");
  return { header, payload };
}

// ---- signatures --------------------------------------------------------------------------------------------------

const SPKI = Buffer.from("302a300506032b6570032100", "hex"); // DER before the 32 bytes of an Ed25519 public key
const PKCS8 = Buffer.from("302e020100300506032b657004220420", "hex"); // ... before those of a private one

/** What signs with a private key: a PEM text, or its seed of 32 bytes. */
export function signerOf(secret) {
  const der = { key: Buffer.concat([PKCS8, Buffer.from(secret)]), format: "der", type: "pkcs8" };
  const key = createPrivateKey(secret.length === 32 ? der : secret);
  if (key.asymmetricKeyType !== "ed25519") throw new Error("sign.key holds no Ed25519 key; join the fleet again");
  const public_ = createPublicKey(key).export({ format: "der", type: "spki" }).subarray(-32);
  return { public: public_, sign: (data) => signWith(null, Buffer.concat([DOMAIN, data]), key) };
}

/** Whether the holder of `key` (32 bytes) signed `frame`. */
export function signedBy(frame, key) {
  const { sig } = frame.header;
  if (!sig || sig.length !== 64) return false;
  const public_ = createPublicKey({ key: Buffer.concat([SPKI, key]), format: "der", type: "spki" });
  const plain = packed(frame.header, frame.payload.length);
  return verifyWith(null, Buffer.concat([DOMAIN, plain, frame.payload]), public_, sig);
}

// ---- topics ------------------------------------------------------------------------------------------------------

const NAMES = { fleet: /^[a-z0-9][a-z0-9_-]{0,35}$/, device: /^[a-z0-9][a-z0-9-]{0,35}$/ };

/** The topics of one device. */
export function topicsOf(fleet, device) {
  for (const [what, value] of Object.entries({ fleet, device }))
    if (!NAMES[what].test(value)) throw new Error(`${what}=${JSON.stringify(value)} is no name; see docs/PROTOCOL.md`);
  const root = `fl/1/${fleet}`;
  const own = `${root}/d/${device}`;
  const fixed = { [`${root}/co/state`]: "co/state", [`${root}/co/model`]: "co/model", [`${own}/cmd`]: "cmd" };
  return {
    state: `${own}/state`,
    events: `${own}/evt`,
    up: (transfer) => `${own}/up/${transfer}`,
    filters: [`${root}/co/#`, `${root}/m/#`, `${own}/cmd`, `${own}/dn/#`],
    /** What a topic is to this device: co/state, co/model, cmd, m or dn; undefined for all else. */
    kind(topic) {
      if (Object.hasOwn(fixed, topic)) return fixed[topic];
      if (topic.startsWith(`${root}/m/`) && /^[0-9a-f]{8}\/(0|[1-9]\d{0,5})$/.test(topic.slice(root.length + 3))) return "m";
      return topic.startsWith(`${own}/dn/`) && /^[a-z0-9]{1,32}$/.test(topic.slice(own.length + 4)) ? "dn" : undefined;
    },
  };
}

// ---- bitmaps and chunks ------------------------------------------------------------------------------------------

/** A bitmap of `count` bits, least significant first. */
export function bitsOf(indices, count) {
  const bitmap = Buffer.alloc(Math.ceil(count / 8));
  for (const index of indices) bitmap[index >> 3] |= 1 << (index & 7);
  return bitmap;
}

/** The set bits of a bitmap of `count` bits, ascending. */
export function indicesOf(bitmap, count) {
  const found = [];
  for (let index = 0; index < 8 * bitmap.length; index++) if ((bitmap[index >> 3] >> (index & 7)) & 1) found.push(index);
  if (bitmap.length !== Math.ceil(count / 8) || found.at(-1) >= count)
    throw new WireError(`bitmap of ${bitmap.length} bytes does not describe ${count} places`);
  return found;
}

/** The size of chunks, at most `chunk`, where a broker takes `largest` bytes as one message. */
export function chunkWithin(largest, chunk) {
  if (largest < LEAST)
    throw new WireError(`the broker takes at most ${largest} bytes as one message, and ${LEAST} are needed; raise its bound (Mosquitto: max_packet_size)`);
  return Math.min(chunk, largest - ROOM);
}

/** How bytes are cut. */
export function describe(data, chunk) {
  if (!data.length || !(chunk >= data.length / MAX_CHUNKS)) throw new WireError(`${data.length} bytes cannot be cut in ${chunk}`);
  const hashes = [];
  for (let at = 0; at < data.length; at += chunk) hashes.push(sha256(data.subarray(at, at + chunk)));
  return { size: data.length, chunk, sha256: sha256(data), hashes: Buffer.concat(hashes) };
}

export const countOf = (cut) => Math.ceil(cut.size / cut.chunk);

/** Offset and length of a chunk. */
export function placeOf(cut, index) {
  if (index >= countOf(cut)) throw new WireError(`chunk ${index} is beyond the ${countOf(cut)} of this transfer`);
  return [index * cut.chunk, Math.min(cut.chunk, cut.size - index * cut.chunk)];
}

/** Whether `data` is exactly chunk `index`. */
export function fits(cut, index, data) {
  const [, length] = placeOf(cut, index);
  return data.length === length && sha256(data).equals(Buffer.from(cut.hashes.subarray(32 * index, 32 * index + 32)));
}

/** Remembers which numbers were seen: nothing counts twice, nothing old counts at all. Plain data in `seen`. */
export function fresh(seen, boot, seq) {
  if (boot < seen.boot || seq < 1) return false;
  if (boot > seen.boot) Object.assign(seen, { boot, high: 0, late: [] });
  if (seq > seen.high) {
    for (let missed = Math.max(seen.high + 1, seq - 63); missed < seq; missed++) seen.late.push(missed);
    seen.high = seq;
    seen.late = seen.late.filter((one) => seq - one < 64);
    return true;
  }
  const at = seen.late.indexOf(seq);
  if (at >= 0) seen.late.splice(at, 1);
  return at >= 0;
}
