// Training by programs (docs/programs.md): ONNX graphs that are one step each. Runs in Node and in a page; `ort` is
// onnxruntime-node or onnxruntime-web.
import { AUGMENTATIONS } from "./augment.mjs";
import { batches, kept, stepsOf } from "./draws.mjs";
import { product } from "./tensors.mjs";

const TYPES = { F32: "float32", I64: "int64" };
const DTYPES = { float32: "F32", int64: "I64" };

/** A graph of ours, opened to run on one thread. */
export async function open(ort, data) {
  const session = await ort.InferenceSession.create(data, { intraOpNumThreads: 1, interOpNumThreads: 1 });
  return { ort, session };
}

const toOrt = ({ ort }, { dtype, shape, data }) => new ort.Tensor(TYPES[dtype], data, shape);
const fromOrt = ({ type, dims, data }) => ({ dtype: DTYPES[type], shape: [...dims], data });
const scalar = ({ ort }, value) => new ort.Tensor("float32", Float32Array.of(value), []);
const weightOf = (name) => (name.startsWith("weight/") ? name.slice("weight/".length) : undefined);

/** The rows `index` of samples {x: tensor, y: [labels]}. */
export function rows({ x, y }, index) {
  const each = product(x.shape.slice(1));
  const data = new Float32Array(index.length * each);
  index.forEach((from, to) => data.set(x.data.subarray(from * each, (from + 1) * each), to * each));
  return { x: { dtype: "F32", shape: [index.length, ...x.shape.slice(1)], data }, y: index.map((i) => y[i]) };
}

/** Runs a graph that only looks: `given` beside the state, its outputs by name. */
export async function look(program, given, state) {
  const feeds = {};
  for (const name of program.session.inputNames) {
    const tensor = given[name] ?? state[weightOf(name)];
    if (!tensor) throw new Error(`program: needs ${name}, which the state does not have`);
    feeds[name] = toOrt(program, tensor);
  }
  const found = await program.session.run(feeds);
  return Object.fromEntries(Object.entries(found).map(([name, value]) => [name, fromOrt(value)]));
}

/** The sizes of an input, of which the batch stays N: the widths of names, times numbers, and `#` numbers, with + between. */
function shapeOf({ inputMetadata }, wanted, state) {
  const widths = {};
  for (const { name, shape } of inputMetadata)
    if (weightOf(name)) shape.forEach((size, i) => (widths[size] = state[weightOf(name)].shape[i]));
  return inputMetadata.find(({ name }) => name === wanted).shape.map((size) => {
    if (typeof size === "number" || size === "N") return size;
    if (size in widths) return widths[size];
    const each = (one) => {
      const at = one.lastIndexOf("*");
      return one in widths ? widths[one] : one[0] === "#" ? +one.slice(1) : Math.round(widths[one.slice(0, at)] * one.slice(at + 1));
    };
    return size.split("+").reduce((sum, one) => sum + each(one), 0);
  });
}

/**
 * The whole state after SGD from `state`. `draws(purpose)` gives the draws of this round; `falls` is the share of values
 * that each dropout layer lets fall.
 */
export async function train(program, state, samples, recipe, draws, { purpose = "train", falls = {} } = {}) {
  if (recipe.accumulate > 1) throw new Error("this device cuts no batches into slices; set accumulate = 1");
  if (!Object.hasOwn(AUGMENTATIONS, recipe.augment)) throw new Error(`augment=${recipe.augment} is not known to this device`);
  const augment = AUGMENTATIONS[recipe.augment];
  const { session } = program;
  const now = { ...state };
  const momentum = {};
  const layers = {};
  const streams = {};
  for (const name of session.inputNames) {
    const [kind, rest] = [name.slice(0, name.indexOf("/")), name.slice(name.indexOf("/") + 1)];
    if (kind === "weight" && !now[rest]) throw new Error(`program: needs the weight ${rest}, which the state does not have`);
    if (kind === "momentum") momentum[rest] = { ...now[rest], data: new Float32Array(now[rest].data.length) };
    if (kind === "draw") {
      const layer = rest in falls ? rest : rest.slice(0, rest.lastIndexOf("#")); // which the pass calls again: it goes on
      if (!(layer in falls)) throw new Error(`program: it is not told how much ${rest} lets fall`);
      streams[layer] ??= await draws(`${purpose}/layers/${layer}`);
      layers[rest] = { shape: shapeOf(session, name, now), share: falls[layer], draws: streams[layer] };
    }
    if (kind === "anchor" || name === "pull") throw new Error("program: it pulls, which this device does not");
  }
  const shuffled = await draws(purpose);
  for (const index of batches(samples.y.length, recipe.batch, stepsOf(recipe, samples.y.length), shuffled)) {
    const batch = rows(samples, index);
    const x = augment(batch.x, shuffled);
    const y = { dtype: "I64", shape: [index.length], data: BigInt64Array.from(batch.y, BigInt) };
    const feeds = { x: toOrt(program, x), y: toOrt(program, y), lr: scalar(program, recipe.lr) };
    for (const name of session.inputNames) {
      const rest = name.slice(name.indexOf("/") + 1);
      if (name.startsWith("weight/")) feeds[name] = toOrt(program, now[rest]);
      if (name.startsWith("momentum/")) feeds[name] = toOrt(program, momentum[rest]);
      if (name.startsWith("draw/")) {
        const shape = layers[rest].shape.map((size) => (size === "N" ? index.length : size));
        feeds[name] = toOrt(program, { dtype: "F32", shape, data: kept(layers[rest].draws, layers[rest].share, product(shape)) });
      }
    }
    const found = await session.run(feeds);
    for (const [name, value] of Object.entries(found)) {
      if (name.startsWith("next/weight/")) now[name.slice("next/weight/".length)] = fromOrt(value);
      if (name.startsWith("next/momentum/")) momentum[name.slice("next/momentum/".length)] = fromOrt(value);
    }
  }
  return now;
}

/** The most likely class of each row of logits (N, classes). */
export function labelsOf({ shape: [count, classes], data }) {
  const best = (row) => row.indexOf(Math.max(...row));
  return Array.from({ length: count }, (_, i) => best(data.subarray(i * classes, (i + 1) * classes)));
}

/** The share of samples that the state labels right; 0 without samples. */
export async function accuracy(forward, state, samples) {
  if (!samples.y.length) return 0;
  const [logits] = Object.values(await look(forward, { x: samples.x }, state));
  return labelsOf(logits).filter((label, i) => label === samples.y[i]).length / samples.y.length;
}

const isFresh = (name) => ({ F32: name.endsWith("running_var") ? 1 : 0, I64: 0n });

/** BatchNorm's statistics estimated anew by one pass over the samples; everything else stays as it is. */
export async function calibrated(program, state, samples, size = 256) {
  const names = program.session.outputNames.map((name) => name.slice("next/weight/".length));
  if (samples.y.length < 2) return state;
  const now = { ...state };
  for (const name of names) now[name] = { ...now[name], data: now[name].data.slice().fill(isFresh(name)[now[name].dtype]) };
  const pieces = Math.ceil(samples.y.length / size); // each takes its rows from all over, as these may be sorted by label
  for (let done = 0; done < pieces; done++) {
    const index = [...samples.y.keys()].filter((row) => row % pieces === done);
    const rate = { dtype: "F32", shape: [], data: Float32Array.of(1 / (done + 1)) };
    const found = await look(program, { x: rows(samples, index).x, rate }, now);
    for (const name of names) now[name] = found[`next/weight/${name}`];
  }
  return now;
}
