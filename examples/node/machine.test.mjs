// How this device gets its run's kit, and cuts its update anew, message by message: node --test machine.test.mjs
import assert from "node:assert/strict";
import { test } from "node:test";
import { Machine, newState } from "./machine.mjs";
import { bitsOf, countOf, decodeFrame, decodeMessage, describe, encodeFrame, encodeMessage, placeOf, transferOf } from "./wire.mjs";

const KIT = Buffer.from(Array.from({ length: 5000 }, (_, index) => index % 251));
const CUT = describe(KIT, 1000);
const NONE = Buffer.alloc(0);

/** A device that is linked and wants its kit; `heard` gives what it asked for, `did` what else it wanted done. */
function wanting(own = {}) {
  const done = [];
  const noted = (name) => (...given) => void done.push([name, ...given]);
  const world = new Proxy({}, { get: (_, name) => noted(name) });
  const clock = { now: 0 };
  const all = { fleet: "watch", device: "anna", profile: NONE, process: Buffer.alloc(16), retry: 2, maxModel: 2 ** 20, ...own };
  const machine = new Machine(all, newState(), world, () => clock.now);
  let seq = 0;
  const topic = (kind) => `fl/1/watch/d/anna/${kind}`;
  const tell = (type, message) =>
    machine.received(topic("cmd"), encodeFrame({ type, fleet: "watch", device: "anna", boot: 1, seq: ++seq }, encodeMessage(type, message)), false);
  const send = (index, data) => {
    const [off, length] = placeOf(CUT, index);
    const header = { type: "chunk", fleet: "watch", device: "anna", boot: 1, xfer: transferOf(CUT.sha256), idx: index, off };
    machine.received(topic("dn/x"), encodeFrame(header, data ?? KIT.subarray(off, off + length)), false);
  };
  const did = (name) => done.filter(([one]) => one === name).map(([, ...given]) => given);
  const heard = () => {
    const frames = did("publish").map(([, payload]) => decodeFrame(payload));
    return frames.filter((frame) => frame.header.type === "wantkit").map(decodeMessage);
  };
  machine.begin(NONE, [], NONE);
  machine.connecting();
  machine.connected();
  machine.needKit();
  return { machine, clock, tell, send, heard, did };
}

const asked = (want) => [Buffer.from(want.sha256).toString("hex"), Buffer.from(want.bitmap).toString("hex")];
const named = { ...CUT, nonce: Buffer.alloc(16) };

test("a kit is asked for, again while nobody answers, and its chunks once it is named", () => {
  const one = wanting();
  one.clock.now = 3;
  one.machine.tick();
  one.tell("kit", named);
  assert.deepEqual(one.did("kitBegun").map(([cut]) => cut.size), [KIT.length]);
  one.machine.kitFound(CUT.sha256, [1]); // this one lies on flash
  const wants = one.heard().map(asked);
  const missing = bitsOf([0, 2, 3, 4], countOf(CUT)).toString("hex");
  assert.deepEqual(wants, [["", ""], ["", ""], [CUT.sha256.toString("hex"), missing]]);
  for (const index of [0, 2, 3, 4, 4]) one.send(index);
  assert.deepEqual(one.did("keep").map(([what, , index]) => [what, index]), [["kit", 0], ["kit", 2], ["kit", 3], ["kit", 4]]);
  assert.equal(one.did("kitComplete").length, 1);
  one.machine.kitStored();
  one.tell("kit", named); // said twice: it is here by now
  assert.equal(one.did("kitBegun").length, 1);
});

test("a wrong chunk changes nothing, and what is missing is asked for again", () => {
  const one = wanting();
  one.tell("kit", named);
  one.machine.kitFound(CUT.sha256, [0, 1, 2, 3]);
  one.send(4, Buffer.alloc(1000));
  assert.match(one.did("refused")[0][1], /does not match the manifest/);
  assert.equal(one.did("keep").length, 0);
  one.clock.now = 3;
  one.machine.tick();
  assert.deepEqual(one.heard().map(asked).slice(-2).map(([, bitmap]) => bitmap), ["10", "10"]);
});

test("where there is none, or one too large, the reason is told and nothing more is asked", () => {
  for (const [own, type, message, reason] of [
    [{}, "nokit", { reason: "the coordinator has no torch" }, /has no torch/],
    [{ maxModel: 4000 }, "kit", named, /5000 bytes is above this device's 4000; raise max_model/],
  ]) {
    const one = wanting(own);
    one.tell(type, message);
    assert.match(one.did("kitRefused")[0][0], reason);
    one.clock.now = 30;
    one.machine.tick();
    assert.equal(one.heard().length, 1);
  }
});

/** A device that has offered KIT as its update, in pieces of `chunk` bytes; `born` is its coordinator's birth with these
 * settings, and `said` what it says of the update. */
function offering(chunk) {
  const frames = [];
  const world = new Proxy({}, {
    get: (_, name) => (...given) => {
      if (name === "update") return KIT.subarray(given[0], given[0] + given[1]);
      if (name === "publish") frames.push(decodeFrame(given[1]));
    },
  });
  const cut = describe(KIT, chunk);
  const job = { attempt: 1, version: 0, digest: Buffer.alloc(32), spec: "", epoch: 1, phase: "offering", cut, reason: "", outcome: "" };
  const own = { fleet: "watch", device: "anna", profile: NONE, process: Buffer.alloc(16), retry: 2, maxModel: 2 ** 20 };
  const state = { ...newState(), job };
  const machine = new Machine(own, state, world, () => 0);
  machine.begin(NONE, [], cut.sha256);
  machine.connecting();
  machine.connected();
  let epoch = 1;
  const born = (settings) => {
    const told = { online: true, key: NONE, chunk: 4000, credit: 8, max_update: 2 ** 20, retry: 2, spec: Buffer.from("{}"), ...settings };
    const header = { type: "co", fleet: "watch", device: "", boot: ++epoch, seq: 1 };
    machine.received("fl/1/watch/co/state", encodeFrame(header, encodeMessage("co", told)), true);
  };
  const said = (type) => frames.filter((frame) => frame.header.type === type).map(decodeMessage);
  return { machine, state, born, said };
}

test("an update that waits is cut anew where its coordinator takes smaller chunks now", () => {
  const one = offering(4000);
  one.born({ chunk: 1000 });
  const offers = one.said("offer");
  assert.deepEqual(offers.map((offer) => offer.chunk), [4000, 1000]);
  assert.deepEqual(Buffer.from(offers[1].hashes), describe(KIT, 1000).hashes);
});

test("an update that waits is declined where it cannot be cut as its coordinator takes it now", () => {
  const one = offering(4000);
  one.born({ chunk: 1 });
  assert.deepEqual(one.said("decline").map(({ reason }) => reason), ["5000 bytes cannot be cut in 1"]);
  one.machine.tick();
  assert.equal(one.said("offer").length, 1);
});

test("a model that was called off is fetched no more where the one before is named again", () => {
  const one = wanting();
  const announced = (epoch, version, data) => {
    const header = { type: "model", fleet: "watch", device: "", boot: epoch };
    const manifest = { ...describe(data, 1000), nonce: Buffer.alloc(16), version };
    one.machine.received("fl/1/watch/co/model", encodeFrame(header, encodeMessage("model", manifest)), false);
  };
  one.machine.modelStored(CUT.sha256);
  announced(1, 5, KIT.subarray(1));
  one.machine.fetchModel();
  assert.equal(one.machine.state.fetch.version, 5);
  announced(2, 4, KIT); // by a coordinator that was restored
  assert.equal(one.machine.state.fetch, null);
  assert.deepEqual(one.did("discard").map(([what, { size }]) => [what, size]), [["model", 4999]]);
  one.machine.fetchModel();
  one.clock.now = 100;
  one.machine.tick();
  assert.equal(one.did("publish").map(([, payload]) => decodeFrame(payload).header.type).filter((type) => type === "want").length, 0);
});

test("an update that waits is declined where its coordinator takes smaller ones now", () => {
  const one = offering(4000);
  one.born({ max_update: 4999 });
  one.machine.tick();
  assert.equal(one.said("offer").length, 1); // the one before the coordinator said so
  const [{ attempt, reason }] = one.said("decline");
  assert.deepEqual([attempt, reason], [1, "update of 5000 bytes; at most 4999 ([rounds] max_update of its fleet)"]);
  assert.equal(one.state.job.phase, "refused");
  one.born({ max_update: 5000 }); // nobody has asked anew: it stays declined, and says so again
  assert.deepEqual([one.said("offer").length, one.said("decline").length], [1, 2]);
});
