// What a device without torch needs for a run, in one file (`talaria programs kit`): where its private parts begin, the
// training step, the model that only looks.
import { createHash } from "node:crypto";
import fs from "node:fs";
import { inflateSync } from "node:zlib";
import { pythonFloat, unpack } from "./tensors.mjs";

/** The name under which a kit holds the step that trains everything by this recipe. */
export function nameOf({ accumulate, momentum, smoothing, weight_decay: decay }) {
  const numbers = [momentum, smoothing, decay].map(pythonFloat);
  const need =
    `{"accumulate":${accumulate},"momentum":${numbers[0]},"only":null,"pulled":false,` +
    `"smoothing":${numbers[1]},"upper":false,"weight_decay":${numbers[2]}}`;
  return `program/${createHash("sha256").update(need).digest("hex")}`;
}

/** No file in a kit may be larger than 16 MiB. */
const inflated = (data) => inflateSync(data, { maxOutputLength: 1 << 24 });

/** A graph as it is; an error where values of it lie outside, as `location` says: ONNX Runtime would read any file below this folder. */
function whole(graph) {
  if (graph && ["\x08location", "\0location"].some((mark) => graph.includes(mark, 0, "latin1")))
    throw new Error("the kit has a graph whose values lie in files outside of it; it is never opened");
  return graph;
}

/** `{state, falls, step, forward, calibration}` of the run; an error where the kit is of another one. */
export function opened(file, run) {
  const { tensors, metadata } = unpack(new Uint8Array(fs.readFileSync(file)));
  if (metadata["talaria-kit"] !== "2") throw new Error(`${file} is no kit of version 2; make it with talaria programs kit`);
  const about = JSON.parse(inflated(tensors.about.data));
  if (about.run !== run.digest) throw new Error("the kit here was made for another run; make it anew");
  // What travels has a shape here, and its values in the global model.
  const state = Object.fromEntries(about.state.map(([name, dtype, shape]) => [name, tensors[`state/${name}`] ?? { dtype, shape }]));
  const held = (name) => whole(tensors[`file/${name}`] && inflated(tensors[`file/${name}`].data));
  const step = held(nameOf(run.recipe));
  if (!step) throw new Error("the kit holds no program that trains everything; use another algorithm");
  return { state, falls: about.falls, step, forward: held("forward"), calibration: held("calibration") };
}
