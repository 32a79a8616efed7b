// One device's rounds: from the global model and its private state to an update and the next private state.
import fs from "node:fs";
import { createRequire } from "node:module";
import { AUGMENTATIONS } from "./augment.mjs";
import { Draws } from "./draws.mjs";
import { CODECS, compensated, differences, encodeUpdate, fromPlanes, isCoarse, pack, unpack } from "./tensors.mjs";
import { accuracy, calibrated, open, train } from "./training.mjs";
import { sha256 } from "./wire.mjs";

/** Algorithms whose devices train everything at once, send the shared names and keep the rest. */
const ALGORITHMS = ["fedavg", "fedper", "lg_fedavg"];
const FIELDS = ["spec", "algorithm", "hparams", "recipe", "rounds", "seed", "buffers", "fraction", "codec", "download", "asynchronous", "follows"];
const whole = (low) => (value) => Number.isInteger(value) && value >= low;
const orNone = (good) => (value) => value === null || good(value);
const RECIPE = {
  epochs: whole(0),
  batch: whole(1),
  lr: Number.isFinite,
  momentum: Number.isFinite,
  weight_decay: Number.isFinite,
  smoothing: Number.isFinite,
  steps: orNone(whole(0)),
  most_steps: orNone(whole(1)),
  accumulate: (value) => value === 1,
  augment: (value) => Object.hasOwn(AUGMENTATIONS, value),
};
const RESERVED = /^(mask|stats|frozen)\//;
const LEFT = "left/";
const LARGEST = 1e6;

/** The run in a coordinator's birth. Throws, with the reason, where it cannot be learned here. */
export function runOf(spec) {
  // Whole numbers beyond what a double holds (a seed) stay text, which BigInt reads.
  const run = JSON.parse(spec.toString().replace(/([:[,])(\d{16,})(?=[,}\]])/g, '$1"$2"'));
  const odd = [
    ...Object.keys(run).filter((name) => !FIELDS.includes(name)),
    ...Object.keys(run.recipe ?? {}).filter((name) => !Object.hasOwn(RECIPE, name)),
  ];
  if (odd.length) throw new Error(`the run has ${odd.join(", ").slice(0, 100)}, which this device does not know`);
  if (!ALGORITHMS.includes(run.algorithm)) throw new Error(`algorithm ${run.algorithm} cannot be learned here; use ${ALGORITHMS}`);
  if (!CODECS.includes(run.codec)) throw new Error(`codec ${run.codec} is not spoken here; use ${CODECS}`);
  for (const [name, good] of Object.entries(RECIPE))
    if (!good(run.recipe?.[name])) throw new Error(`recipe: ${name}=${JSON.stringify(run.recipe?.[name])?.slice(0, 40)} is not known here`);
  if (!whole(1)(run.rounds)) throw new Error(`rounds=${JSON.stringify(run.rounds)?.slice(0, 40)} is not known here`);
  // Which run it is, however many rounds it goes on for: the canonical text without them.
  const lasting = spec.toString().replace(/,"rounds":\d+,"seed":/, ',"seed":');
  return { ...run, digest: sha256(Buffer.from(`talaria-run-2 ${lasting}`)).toString("hex") };
}

/** Samples of a safetensors file with x_train, y_train and perhaps x_val, y_val; an error where they are not for the model. */
export function samplesOf(file, { input_shape: wanted, classes }) {
  let tensors;
  try {
    ({ tensors } = unpack(new Uint8Array(fs.readFileSync(file))));
  } catch (problem) {
    throw new Error(`${file}: is no safetensors file (${problem.message}); write it anew, as README.md says`);
  }
  const part = (name) => {
    const [x, y] = [tensors[`x_${name}`], tensors[`y_${name}`]];
    if (!x || !y) return { x: { dtype: "F32", shape: [0, ...wanted], data: new Float32Array() }, y: [] };
    if (x.dtype !== "F32" || y.dtype !== "I64" || x.shape[0] !== y.data.length || !x.data.every(Number.isFinite))
      throw new Error(`${file}: x_${name} must be finite float32 and y_${name} int64, one label for each`);
    if (String(x.shape.slice(1)) !== String(wanted))
      throw new Error(`${file}: x_${name} has windows of ${x.shape.slice(1)}, the model takes ${wanted}`);
    const labels = Array.from(y.data, Number);
    if (!labels.every((label) => label >= 0 && label < classes))
      throw new Error(`${file}: y_${name} must lie in 0..${classes - 1}`);
    return { x, y: labels };
  };
  const found = { train: part("train"), val: part("val") };
  if (!found.train.y.length) throw new Error(`${file}: there are no training samples to learn from`);
  return found;
}

const tensorsIn = (stored) => unpack(Uint8Array.from(stored)).tensors;
const named = (tensors, good) => Object.fromEntries(Object.entries(tensors).filter(([name]) => good(name)));

/** What begins, with the values that it had in a run before: all of them, or of a head that has grown the first rows. */
export function carried(begun, old) {
  const plain = (name) => name.split(".").filter((part) => part !== "base").join("."); // without an adapter around its layer
  const known = Object.fromEntries([...Object.keys(old).map((name) => [plain(name), name]), ...Object.keys(old).map((name) => [name, name])]);
  const grown = (name, now) => {
    const was = old[known[name] ?? known[plain(name)]];
    const rows = was && was.dtype === now.dtype && was.shape.length === now.shape.length && String(was.shape.slice(1)) === String(now.shape.slice(1));
    if (!rows || was.shape[0] > now.shape[0]) return now;
    const data = now.data.slice();
    data.set(was.data);
    return { ...now, data };
  };
  return Object.fromEntries(Object.entries(begun).map(([name, now]) => [name, grown(name, now)]));
}

const shapes = (tensors) => JSON.stringify(Object.entries(tensors).map(([k, v]) => [k, v.dtype, v.shape]).sort());

/** ONNX Runtime; it tells its maker what it runs, unless this is said before it is loaded. */
export function runtime() {
  process.env.ORT_DISABLE_TELEMETRY ??= "1";
  return createRequire(import.meta.url)("onnxruntime-node");
}

export class Learner {
  /** `config`: device and data; `kit` as `opened` gives it. */
  constructor(config, store, run, kit) {
    Object.assign(this, { config, store, run, kit });
    this.initial = kit.state;
    this.#held();
  }

  /** The private state in force, of this run or one that it follows. That of a run that followed ours, and was called off, gives way to the one before. */
  #held() {
    const { run, store } = this;
    const ours = [run.digest, ...(run.follows ?? [])];
    let held = store.private();
    while (held && !ours.includes(held.run) && held.follows?.some((one) => ours.includes(one))) {
      store.takeBack();
      held = store.private();
    }
    if (held && !ours.includes(held.run)) throw new Error("the private state belongs to another run; give a new state folder");
    return held;
  }

  async #program(name) {
    this.ort ??= runtime();
    return open(this.ort, this.kit[name]);
  }

  /** The shared state in the global model on flash, checked against the run's own model. */
  #shared(digest) {
    const data = this.store.read("model.bin");
    if (sha256(data).toString("hex") !== digest) throw new Error("the global model on flash is another one by now");
    const found = named(fromPlanes(unpack(new Uint8Array(data)).tensors), (name) => !RESERVED.test(name));
    if (shapes(found) !== shapes(named(this.initial, (name) => name in found))) throw new Error("the global model is not of this run's model");
    return found;
  }

  /** Private tensors in force, of a run before this one what fits; on a first participation those that all begin from. */
  #own(shared) {
    const held = this.#held();
    if (held?.run === this.run.digest) return tensorsIn(held.tensors);
    return carried(named(this.initial, (name) => !(name in shared)), held ? tensorsIn(held.tensors) : {});
  }

  /** Learn a round, or find it done. Update and private state are on flash when this returns the update's bytes. */
  async learn(round, digest, after, epoch) {
    const { run, store } = this;
    const done = store.trained();
    if (done && done.round === round && done.digest === digest && done.run === run.digest) return done.update;
    if (after === undefined || done?.round === after) store.publish();
    else store.discard();
    const held = this.#held();
    if (held && held.round >= round && held.epoch >= epoch) throw new Error(`round ${round} was learned before, from another model`);
    const shared = this.#shared(digest);
    const own = this.#own(shared);
    const { train: samples } = samplesOf(this.config.data, run.spec);
    const state = { ...shared, ...named(own, (name) => !name.startsWith(LEFT)) };
    const draws = (purpose) => Draws.of(run.seed, this.config.device, round, purpose);
    this.step ??= await this.#program("step");
    const moved = await train(this.step, state, samples, run.recipe, draws, { falls: this.kit.falls });
    const kind = run.codec !== "raw" || run.asynchronous ? "delta" : "value";
    let sent = named(moved, (name) => name in shared);
    if (kind === "delta") sent = differences(sent, shared);
    if (isCoarse(run.codec)) {
      const left = Object.entries(own).filter(([name]) => name.startsWith(LEFT));
      sent = compensated(sent, Object.fromEntries(left.map(([name, value]) => [name.slice(LEFT.length), value])));
    }
    this.#requireSound(sent);
    const facts = { client: this.config.device, weight: samples.y.length, baseVersion: round - 1, kind };
    const { data, left } = encodeUpdate(sent, facts, run.codec);
    const kept = named(moved, (name) => !(name in shared));
    if (isCoarse(run.codec)) for (const [name, value] of Object.entries(left)) kept[LEFT + name] = value;
    store.stage({ round, digest, run: run.digest, epoch, follows: run.follows ?? [] }, data, pack(kept));
    return Buffer.from(data);
  }

  /** Nothing leaves that the coordinator would refuse, and shut this device out for. */
  #requireSound(tensors) {
    let square = 0;
    for (const { dtype, data } of Object.values(tensors)) if (dtype === "F32") for (const value of data) square += value * value;
    if (!(square <= LARGEST ** 2)) throw new Error("what was learned is not finite or too large; it cannot be sent");
  }

  /** The personal state from the last global model; `personal.safetensors` keeps it. */
  async finish(digest) {
    if (this.run.asynchronous) this.store.discard();
    else this.store.publish();
    const shared = this.#shared(digest);
    let state = { ...shared, ...named(this.#own(shared), (name) => !name.startsWith(LEFT)) };
    const { train: samples, val } = samplesOf(this.config.data, this.run.spec);
    const counters = Object.entries(state).filter(([name]) => name.endsWith("num_batches_tracked"));
    if (this.kit.calibration && this.run.buffers === "local" && counters.some(([, { data }]) => data[0] === 0n))
      state = await calibrated(await this.#program("calibration"), state, samples);
    this.store.write("personal.safetensors", pack(state));
    const measured = val.y.length ? { accuracy: await accuracy(await this.#program("forward"), state, val) } : {};
    return { rounds: this.#held()?.round ?? 0, personal: this.store.at("personal.safetensors"), ...measured };
  }
}
