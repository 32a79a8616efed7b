// This device against the protocol's vectors: node --test vectors.test.mjs
import assert from "node:assert/strict";
import fs from "node:fs";
import os from "node:os";
import path from "node:path";
import { test } from "node:test";
import { crc32, deflateSync } from "node:zlib";
import { AUGMENTATIONS } from "./augment.mjs";
import * as draws from "./draws.mjs";
import { nameOf, opened } from "./kit.mjs";
import { carried, Learner, runOf, runtime, samplesOf } from "./learner.mjs";
import * as tensors from "./tensors.mjs";
import { open, train } from "./training.mjs";
import * as wire from "./wire.mjs";

const HERE = new URL("../../tests/vectors/", import.meta.url);
const read = (name) => fs.readFileSync(new URL(name, HERE));
/** JSON with its {"hex": ...} as bytes. */
const json = (name) =>
  JSON.parse(read(name), (_, value) => (typeof value?.hex === "string" ? Buffer.from(value.hex, "hex") : value));
const hex = (data) => Buffer.from(data).toString("hex");
const plain = (value) =>
  Object.fromEntries(Object.entries(value).map(([k, v]) => [k, v instanceof Uint8Array ? hex(v) : v]));

test("frames are written to the byte, read, and signed", () => {
  const { seeds, frames } = json("frames.json");
  const signers = Object.values(seeds).map(wire.signerOf);
  for (const { header, message, payload, unsigned, signed, public: key } of frames) {
    const content = message ? wire.encodeMessage(header.type, message) : payload;
    const signer = signers.find((one) => key && one.public.equals(key));
    // Times may be written as floats or whole numbers; only a coordinator says them.
    const exactly = !message || !("seconds" in message || "retry" in message);
    if (exactly) assert.equal(hex(wire.encodeFrame(header, content)), hex(unsigned), header.type);
    const frame = wire.decodeFrame(unsigned);
    assert.deepEqual(frame.header, header);
    if (!message) continue;
    assert.deepEqual(plain(wire.decodeMessage(frame)), plain(message));
    if (exactly) assert.equal(hex(wire.encodeFrame(header, content, signer)), hex(signed));
    assert.ok(wire.signedBy(wire.decodeFrame(signed), key));
    assert.ok(!wire.signedBy(wire.decodeFrame(signed), signers.find((one) => !one.public.equals(key)).public));
    assert.ok(!wire.signedBy(frame, key));
  }
});

test("what is to be refused is refused", () => {
  for (const [name, data] of Object.entries(json("refused.json")))
    assert.throws(() => wire.decodeMessage(wire.decodeFrame(data)), wire.WireError, name);
});

test("bytes are cut, bitmaps and windows of numbers read", () => {
  const { content, cuts, bitmaps, window } = json("transfers.json");
  for (const { name, ...cut } of cuts) {
    assert.deepEqual(plain(wire.describe(content, cut.chunk)), plain(cut));
    assert.equal(wire.transferOf(cut.sha256), name);
    for (let index = 0; index < wire.countOf(cut); index++) {
      const [offset, length] = wire.placeOf(cut, index);
      assert.ok(wire.fits(cut, index, content.subarray(offset, offset + length)));
      assert.ok(!wire.fits(cut, index, Buffer.alloc(length)));
    }
    assert.throws(() => wire.placeOf(cut, wire.countOf(cut)), wire.WireError);
  }
  for (const { indices, count, bitmap } of bitmaps) {
    assert.equal(hex(wire.bitsOf(indices, count)), hex(bitmap));
    assert.deepEqual(wire.indicesOf(bitmap, count), indices);
  }
  assert.throws(() => wire.indicesOf(Buffer.from([4]), 2), wire.WireError);
  for (const chunk of [0, -280, 1, NaN]) assert.throws(() => wire.describe(Buffer.alloc(4000), chunk), /cannot be cut/);
  assert.deepEqual([[Infinity, 5000], [8000, 5000], [5280, 5000]].map((one) => wire.chunkWithin(...one)), [5000, 5000, 4000]);
  assert.throws(() => wire.chunkWithin(1280, 5000), /at most 1280 bytes .* 4096 are needed/);
  const seen = { boot: 0, high: 0, late: [] };
  assert.deepEqual(window.map(({ boot, seq }) => wire.fresh(seen, boot, seq)), window.map((one) => one.fresh));
});

test("draws are those of Python", async () => {
  const all = json("draws.json");
  for (const one of all.draws) {
    const key = [BigInt(one.seed), one.client, one.round, one.purpose];
    assert.equal(String(await draws.seedOf(...key)), one.drawn);
    const again = () => draws.Draws.of(...key);
    assert.deepEqual((await again()).words(9).map((word) => word.toString(16).padStart(16, "0")), one.words);
    assert.deepEqual([...(await again()).uniform(5)], one.uniform);
    assert.deepEqual((await again()).order(17), one.order);
    assert.deepEqual((await again()).integers(-3, 4, 12), one.integers);
    for (const [i, value] of [...(await again()).normal(5)].entries())
      assert.ok(Math.abs(value - one.normal[i]) <= 1e-8 * Math.abs(one.normal[i]));
    for (const { share, factors } of one.dropout) assert.deepEqual([...draws.kept(await again(), share, 6)], factors);
  }
  for (const { count, size, steps, batches } of all.batches)
    assert.deepEqual([...draws.batches(count, size, steps, await draws.Draws.of(7, "anna", 3, "train"))], batches);
});

function given(values) {
  const of = ({ dtype, shape, values: data }) =>
    dtype === "int64" ? { dtype: "I64", shape, data: BigInt64Array.from(data, BigInt) } : tensors.float32(shape, data);
  return Object.fromEntries(Object.entries(values).map(([name, value]) => [name, of(value)]));
}

test("updates are written to the byte", () => {
  const told = json("updates.json");
  const [now, before] = [given(told.tensors.new), given(told.tensors.old)];
  assert.equal(hex(tensors.pack(before)), hex(read("model.bin")));
  const { client, weight, base_version: baseVersion, metrics } = told.facts;
  const facts = { client, weight, baseVersion, metrics };
  const raw = tensors.encodeUpdate(now, { ...facts, kind: "value" }, "raw");
  assert.equal(hex(raw.data), hex(read("update-raw.bin")));
  const delta = tensors.differences(now, before);
  for (const codec of ["bf16", "int8"]) {
    const { data, left } = tensors.encodeUpdate(delta, { ...facts, kind: "delta" }, codec);
    assert.equal(hex(data), hex(read(`update-${codec}.bin`)), codec);
    for (const [name, values] of Object.entries(told["left out"][codec])) assert.deepEqual([...left[name].data], values);
  }
  const { left } = tensors.encodeUpdate(delta, { ...facts, kind: "delta" }, "int8");
  const again = tensors.encodeUpdate(tensors.compensated(delta, left), { ...facts, kind: "delta" }, "int8");
  assert.equal(hex(again.data), hex(read("update-int8-fed-back.bin")));
});

test("a global model is read however it travels", () => {
  for (const [codec, values] of Object.entries(json("updates.json").models)) {
    const found = tensors.fromPlanes(tensors.unpack(new Uint8Array(read(`model-${codec}.bin`))).tensors);
    const wanted = given(values);
    assert.deepEqual(Object.keys(found).sort(), Object.keys(wanted).sort());
    for (const [name, { shape, data }] of Object.entries(wanted)) {
      assert.deepEqual(found[name].shape, shape);
      assert.deepEqual([...found[name].data], [...data], `${codec} ${name}`);
    }
  }
});

test("files of tensors are read back, and damaged ones refused", () => {
  const file = new Uint8Array(read("model.bin"));
  const { tensors: found } = tensors.unpack(file);
  assert.equal(hex(tensors.pack(found)), hex(file));
  assert.throws(() => tensors.unpack(file.subarray(0, -1)), /bytes/);
  assert.throws(() => tensors.unpack(new Uint8Array([...file, 0])), /follow/);
  assert.deepEqual([0.1, 18, 1e-7, 1.5e22, 123456.789, 0, -2, 1e15, 1e16].map(tensors.pythonFloat), [
    "0.1", "18.0", "1e-07", "1.5e+22", "123456.789", "0.0", "-2.0", "1000000000000000.0", "1e+16",
  ]);
});

test("names that are numbers stand in a file as other names do", () => {
  const one = (name) => [name, { dtype: "U8", shape: [1], data: Uint8Array.of(7) }];
  const text = Buffer.from(tensors.pack(Object.fromEntries(["b", "2", "10"].map(one)), { a: "b" }).subarray(8)).toString();
  assert.match(text, /^\{"__metadata__":\{"a":"b"\},"10":.*"2":.*"b":/);
});

test("headers of tensors that Python's reader refuses are refused", () => {
  const entry = '{"dtype":"U8","shape":[1],"data_offsets":[0,1]}';
  const file = (header, values = [1]) => {
    const out = Uint8Array.from([...Buffer.alloc(8), ...Buffer.from(header), ...values]);
    new DataView(out.buffer).setBigUint64(0, BigInt(Buffer.byteLength(header)), true);
    return out;
  };
  assert.deepEqual(tensors.unpack(file(`{"__metadata__":{"a\\":":"\\"b\\":"},"w" : ${entry}}`)).metadata, { 'a":': '"b":' });
  for (const [header, said, values] of [
    [`{"w":${entry},"w":${entry}}`, /twice/],
    [`{"w":${entry.replace("}", ',"shape":[1]}')}}`, /twice/],
    [`{"w":${entry.replace("}", ',"more":1}')}}`, /too many/],
    [`{"w":${entry.replace("[1]", "[1.0]")}}`, /not whole/],
    [`{"w":${entry.replace("[1]", "[1e0]")}}`, /not whole/],
    [`{"w":${entry.replace("U8", "BOOL")}}`, /neither 0 nor 1/, [2]],
    [`{"w":${entry.replace('"U8"', '["U8"]')}}`, /dtype/],
    [`{"__proto__":${entry}}`, /__proto__ is not allowed/],
    [`{"constructor":${entry}}`, /constructor is not allowed/],
    [`{"":${entry}}`, /not allowed/],
    [`{"${"w".repeat(201)}":${entry}}`, /not allowed/],
    [`{"w":null}`, /twice, or one too many/],
    [`{"w":${entry},"__metadata__":{"a":1}}`, /no table of texts/],
    [`{"w":${entry},"__metadata__":"a"}`, /no table of texts/],
    [`\ufeff{"w":${entry}}`, /no JSON/],
    ["null", /no table/],
    ["[]", /no table/],
  ])
    assert.throws(() => tensors.unpack(file(header, values)), said, header);
});

test("a run whose numbers cannot be is refused before anything is learned", () => {
  const text = read("run.json").toString();
  assert.equal(runOf(Buffer.from(text)).recipe.batch, 8);
  for (const [was, is, said] of [
    ['"batch":8', '"batch":0', /batch=0 is not known/],
    ['"batch":8', '"batch":"8"', /batch="8"/],
    ['"epochs":2', '"epochs":null', /epochs=null/],
    ['"steps":null', '"steps":-1', /steps=-1/],
    ['"lr":0.02', '"lr":{}', /lr=\{\}/],
    ['"augment":"none"', '"augment":"toString"', /augment="toString"/],
    ['"rounds":10', '"rounds":-1', /rounds=-1/],
  ])
    assert.throws(() => runOf(Buffer.from(text.replace(was, is))), said);
});

test("a kit whose graphs would read other files is never opened", () => {
  const recipe = { accumulate: 1, momentum: 0.9, smoothing: 0, weight_decay: 0 };
  const folder = fs.mkdtempSync(path.join(os.tmpdir(), "kit-"));
  const kit = (graph) => {
    const held = { about: JSON.stringify({ run: "a", state: [], falls: {} }), [`file/${nameOf(recipe)}`]: graph };
    const bytes = (data) => Uint8Array.from(deflateSync(Buffer.from(data, "latin1")));
    const files = Object.entries(held).map(([name, data]) => [name, bytes(data)]);
    const all = Object.fromEntries(files.map(([name, data]) => [name, { dtype: "U8", shape: [data.length], data }]));
    fs.writeFileSync(path.join(folder, "one.kit"), tensors.pack(all, { "talaria-kit": "2" }));
    return () => opened(path.join(folder, "one.kit"), { digest: "a", recipe });
  };
  assert.equal(kit("weight/location")().step.toString(), "weight/location"); // a layer's name
  for (const length of ["\x08", "\x88\0"]) assert.throws(kit(`\x0a${length}location\x12\x10identity/sign.key`), /outside of it/);
  fs.rmSync(folder, { recursive: true });
});

test("what is private goes on in a run that follows, as far as it fits", () => {
  const of = (shape, ...data) => tensors.float32(shape, data);
  const old = { "head.bias": of([2], 1, 2), "fc.base.weight": of([1, 2], 3, 4), w: of([2], 5, 6), "left/w": of([2], 7, 8) };
  const begun = { "head.bias": of([3], 0, 0, 9), "fc.weight": of([1, 2], 0, 0), w: of([1], 0), n: of([], 1) };
  const found = Object.entries(carried(begun, old)).map(([name, { data }]) => [name, [...data]]);
  assert.deepEqual(found, [["head.bias", [1, 2, 9]], ["fc.weight", [3, 4]], ["w", [0]], ["n", [1]]]);
  const made = (follows) => () => new Learner({}, { private: () => ({ run: "before" }) }, { digest: "now", follows }, { state: {} });
  assert.doesNotThrow(made(["before"]));
  assert.throws(made(undefined), /another run/);
});

test("the program steps as its vector says", async () => {
  const ort = runtime();
  const session = await ort.InferenceSession.create(new Uint8Array(read("step.program")), { intraOpNumThreads: 1 });
  const { tensors: all } = tensors.unpack(new Uint8Array(read("step.safetensors")));
  const types = { F32: "float32", I64: "int64" };
  const feeds = {};
  for (const [name, { dtype, shape, data }] of Object.entries(all))
    if (name.startsWith("in/")) feeds[name.slice(3)] = new ort.Tensor(types[dtype], data, shape);
  const found = await session.run(feeds);
  for (const [name, value] of Object.entries(found))
    for (const [i, wanted] of [...all[`out/${name}`].data].entries())
      assert.ok(Math.abs(value.data[i] - wanted) <= 1e-5 * Math.max(1, Math.abs(wanted)), name);
});

test("whatever comes is read or refused, and nothing else happens", async () => {
  const { frames } = json("frames.json");
  const seen = await draws.Draws.of(0, "", 0, "damage");
  for (let turn = 0; turn < 3000; turn++) {
    const [which, at, value, how] = seen.integers(0, 2 ** 31, 4);
    let data = Buffer.from(frames[which % frames.length].signed ?? frames[which % frames.length].unsigned);
    if (how % 3 === 0) data = data.subarray(0, at % data.length);
    else data[at % data.length] = value & 255;
    // The checksum is set right in every second one, so that what lies behind it is read too.
    if (how % 2 && data.length > 10) data.writeUInt32LE(crc32(data.subarray(0, -4)), data.length - 4);
    try {
      wire.decodeMessage(wire.decodeFrame(data));
    } catch (problem) {
      assert.ok(problem instanceof wire.WireError, problem.stack);
    }
  }
});

test("dropout is drawn in the shape of what it drops", async () => {
  const ort = runtime();
  const program = await open(ort, new Uint8Array(read("step.program")));
  const { tensors: all } = tensors.unpack(new Uint8Array(read("step.safetensors")));
  const state = Object.fromEntries(Object.entries(all).filter(([name]) => name.startsWith("in/weight/")).map(([name, value]) => [name.slice(10), value]));
  const samples = { x: all["in/x"], y: Array.from(all["in/y"].data, Number) };
  const recipe = { epochs: 1, batch: 8, lr: 0.1, accumulate: 1, augment: "none" };
  const drawn = (purpose) => draws.Draws.of(1, "anna", 1, purpose);
  const after = await train(program, state, samples, recipe, drawn, { falls: { drop: 0.25 } });
  assert.deepEqual(Object.keys(after), Object.keys(state));
  assert.ok(after["head.weight"].data.some((value, i) => value !== state["head.weight"].data[i]));
  await assert.rejects(train(program, state, samples, recipe, drawn), /how much drop lets fall/);
});

test("a layer that a pass calls again draws on where it stopped", async () => {
  const [x, w] = [{ dtype: "F32", shape: [3, 2], data: new Float32Array(6) }, { dtype: "F32", shape: [2], data: new Float32Array(2) }];
  const inputs = { x: ["N", 2], y: ["N"], lr: [], "weight/w": [2], "draw/drop": ["N", 2], "draw/drop#2": ["N", 2] };
  const [fed, names] = [[], Object.keys(inputs)];
  const run = async (feeds) => (fed.push(feeds), {});
  const session = { inputNames: names, inputMetadata: names.map((name) => ({ name, shape: inputs[name] })), run };
  const Tensor = function (type, data) { this.data = data; };
  const drawn = (purpose) => draws.Draws.of(1, "anna", 1, purpose);
  const recipe = { epochs: 2, batch: 3, lr: 0.1, accumulate: 1, augment: "none" };
  await train({ session, ort: { Tensor } }, { w }, { x, y: [0, 1, 1] }, recipe, drawn, { falls: { drop: 0.25 } });
  const stream = await drawn("train/layers/drop");
  const found = fed.flatMap((feeds) => [feeds["draw/drop"], feeds["draw/drop#2"]]).map(({ data }) => [...data]);
  assert.deepEqual(found, [1, 2, 3, 4].map(() => [...draws.kept(stream, 0.25, 6)]));
});

test("a batch is augmented as in Python, by the draws of its order", async () => {
  const { tensors: all } = tensors.unpack(new Uint8Array(read("augment.safetensors")));
  const drawn = (purpose) => draws.Draws.of(7, "anna", 3, purpose);
  for (const name of ["imu", "crop_flip"]) {
    const [given, wanted] = [all[`${name}/in`], all[`${name}/out`]];
    const before = given.data.slice();
    const found = AUGMENTATIONS[name](given, await drawn("train"));
    assert.deepEqual([found.dtype, found.shape, given.data], ["F32", wanted.shape, before]);
    if (name === "crop_flip") assert.deepEqual(found.data, wanted.data);
    else assert.ok(found.data.every((value, i) => Math.abs(value - wanted.data[i]) <= 2 ** -20));
    assert.throws(() => AUGMENTATIONS[name]({ ...given, shape: [1, given.data.length] }, null), /use none/);
  }
  const fed = [];
  const run = async (feeds) => (fed.push(feeds.x), {});
  const session = { inputNames: ["x", "y", "lr"], inputMetadata: [{ name: "x", shape: ["N", 2, 17, 8] }], run };
  const Tensor = function (type, data, dims) { Object.assign(this, { data, dims }); };
  const samples = { x: all["crop_flip/in"], y: [0, 1, 0, 1] };
  const recipe = { epochs: 1, batch: 2, lr: 0.1, accumulate: 1, augment: "crop_flip" };
  await train({ session, ort: { Tensor } }, {}, samples, recipe, drawn);
  const stream = await drawn("train");
  const order = stream.order(4);
  const size = 2 * 17 * 8;
  for (const [step, index] of [order.slice(0, 2), order.slice(2)].entries()) {
    const data = Float32Array.from(index.flatMap((i) => [...samples.x.data.subarray(i * size, (i + 1) * size)]));
    assert.deepEqual(fed[step].data, AUGMENTATIONS.crop_flip({ dtype: "F32", shape: [2, 2, 17, 8], data }, stream).data);
  }
  await assert.rejects(train({ session, ort: { Tensor } }, {}, samples, { ...recipe, augment: "toString" }, drawn), /not known/);
});

test("samples that are not for the model are refused before anything is learned", () => {
  const file = path.join(fs.mkdtempSync(path.join(os.tmpdir(), "samples-")), "one.safetensors");
  const of = (shape, labels, fill = 0.5) => {
    const x = { dtype: "F32", shape: [labels.length, ...shape], data: new Float32Array(labels.length * 6).fill(fill) };
    const y = { dtype: "I64", shape: [labels.length], data: BigInt64Array.from(labels, BigInt) };
    fs.writeFileSync(file, tensors.pack({ x_train: x, y_train: y }));
    return () => samplesOf(file, { input_shape: [6], classes: 3 });
  };
  assert.deepEqual(of([6], [0, 2])().train.y, [0, 2]);
  assert.throws(of([2, 3], [0, 1]), /windows of 2,3/);
  assert.throws(of([6], [0, 3]), /0\.\.2/);
  assert.throws(of([6], [-1]), /0\.\.2/);
  assert.throws(of([6], [0], NaN), /finite/);
  assert.throws(of([6], []), /no training samples/);
  fs.writeFileSync(file, "");
  assert.throws(() => samplesOf(file, { input_shape: [6], classes: 3 }), /one.safetensors: is no safetensors file \(tensors: too few bytes\); write it anew/);
  fs.rmSync(path.dirname(file), { recursive: true });
});
