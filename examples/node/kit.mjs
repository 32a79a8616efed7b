// What a device without torch needs for a run: where all begin, the training step, the model that only looks. From a kit
// (one file, `talaria programs kit`) or a folder that prepare.py wrote.
import { createHash } from "node:crypto";
import fs from "node:fs";
import path from "node:path";
import { pythonFloat, unpack } from "./tensors.mjs";

/** The name under which a kit holds the step that trains everything by this recipe. */
export function nameOf({ accumulate, momentum, smoothing, weight_decay: decay }) {
  const numbers = [momentum, smoothing, decay].map(pythonFloat);
  const need =
    `{"accumulate":${accumulate},"momentum":${numbers[0]},"only":null,"pulled":false,` +
    `"smoothing":${numbers[1]},"upper":false,"weight_decay":${numbers[2]}}`;
  return `program/${createHash("sha256").update(need).digest("hex")}`;
}

/** `{state, falls, step, forward, calibration}` of the run; an error where the file or folder is of another one. */
export function opened({ kit, programs }, run) {
  return kit ? ofKit(kit, run) : ofFolder(programs, run);
}

function ofKit(file, run) {
  const { tensors, metadata } = unpack(new Uint8Array(fs.readFileSync(file)));
  if (metadata["talaria-kit"] !== "1") throw new Error(`${file} is no kit of version 1; make it with talaria programs kit`);
  const about = JSON.parse(Buffer.from(tensors.about.data));
  if (about.run !== run.digest) throw new Error("the kit here was made for another run; make it anew");
  const state = Object.fromEntries(about.state.map((name) => [name, tensors[`state/${name}`]]));
  const held = (name) => tensors[`file/${name}`]?.data;
  const step = held(nameOf(run.recipe));
  if (!step) throw new Error("the kit holds no program that trains everything; use another algorithm");
  return { state, falls: about.falls, step, forward: held("forward"), calibration: held("calibration") };
}

function ofFolder(folder, run) {
  const read = (name) => new Uint8Array(fs.readFileSync(path.join(folder, name)));
  const about = JSON.parse(Buffer.from(read("about.json")));
  const same = (name) => JSON.stringify(about[name]) === JSON.stringify(run[name]);
  if (!["spec", "recipe"].every(same)) throw new Error("the programs here are of another model or recipe; prepare them again");
  const { tensors: state } = unpack(read("initial.safetensors"));
  const calibration = fs.existsSync(path.join(folder, "calibrate.onnx")) ? read("calibrate.onnx") : undefined;
  return { state, falls: about.falls, step: read("step.program"), forward: read("forward.onnx"), calibration };
}
