// node predict.mjs RUNTIME BUNDLE: reads float32 windows, or one recording, from stdin, prints the logits of every variant as JSON.
import { readFileSync } from "node:fs";
import { inputs, readBundle } from "../../../examples/browser/bundle.mjs";

const ort = (await import(process.argv[2])).default;
const bundle = await readBundle(new Uint8Array(readFileSync(process.argv[3])));
const raw = readFileSync(0);
const values = new Float32Array(raw.buffer.slice(raw.byteOffset, raw.byteOffset + raw.length));
const { dims } = inputs(bundle, values);

const logits = {};
for (const variant of bundle.variants) {
  const session = await ort.InferenceSession.create(bundle.model(variant));
  const answer = await session.run({ input: new ort.Tensor("float32", values, dims) });
  logits[variant] = Array.from(answer.logits.data);
}
console.log(JSON.stringify({ labels: bundle.labels, task: bundle.task, logits }));
