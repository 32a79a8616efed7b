// What this device keeps where a disk fills up, and where a run is called off: node --test store.test.mjs
import assert from "node:assert/strict";
import fs from "node:fs";
import os from "node:os";
import path from "node:path";
import { test } from "node:test";
import { Learner } from "./learner.mjs";
import { Store } from "./store.mjs";
import { pack } from "./tensors.mjs";
import { describe } from "./wire.mjs";

const DATA = Buffer.from(Array.from({ length: 5000 }, (_, index) => index % 251));

/** What `work` gives on a disk that has room for so many bytes: a write takes what fits, and the one after it is refused. */
function withRoom(room, work) {
  const real = fs.writeSync;
  fs.writeSync = (file, data, offset = 0, length = data.length, place = 0) => {
    if (!room) throw new Error("ENOSPC: no space left on device, write");
    const taken = Math.min(length, room);
    room -= taken;
    return real(file, data, offset, taken, place);
  };
  try {
    return work();
  } finally {
    fs.writeSync = real;
  }
}

test("where the disk fills up, what was kept before stays, and the error names the file and the mend", () => {
  const store = new Store(fs.mkdtempSync(path.join(os.tmpdir(), "store-")));
  try {
    const cut = describe(DATA, 2000);
    const said = (name) => new RegExp(`${name} cannot be written .*no space left.*; free some space`);
    store.seal("private.bin", "before");
    assert.throws(() => withRoom(100, () => store.seal("private.bin", DATA)), said("private.bin.next"));
    assert.equal(store.sealed("private.bin"), "before");
    assert.throws(() => withRoom(100, () => store.keep("model", cut, 1, DATA.subarray(2000, 4000))), said(store.part("model", cut)));
    assert.deepEqual(store.found("model", cut), []);
    store.keep("model", cut, 1, DATA.subarray(2000, 4000));
    assert.deepEqual(store.found("model", cut), [1]);
    store.seal("private.bin", DATA);
    assert.deepEqual(Buffer.from(store.sealed("private.bin")), DATA);
    assert.equal(store.sealed("pending.bin"), null);
    for (const left of ["", "\0".repeat(40)]) {
      fs.writeFileSync(store.at("private.bin"), left); // as a power cut may leave it: nothing begins anew by itself
      assert.throws(() => store.sealed("private.bin"), /private.bin is damaged; restore it/);
    }
  } finally {
    fs.rmSync(store.folder, { recursive: true });
  }
});

test("where a run that followed is called off, the private state of the one before is in force again", async () => {
  const store = new Store(fs.mkdtempSync(path.join(os.tmpdir(), "store-")));
  const learner = (digest, ...follows) => new Learner({}, store, { digest, follows }, { state: {} });
  const stage = (round, run, ...follows) => store.stage({ round, run, follows, digest: "", epoch: 1 }, Buffer.of(round), pack({}));
  const [first, off, next] = [["first"], ["off", "first"], ["next", "first"]];
  try {
    stage(1, ...first);
    store.publish();
    for (const run of [first, next]) {
      stage(2, ...off);
      store.publish();
      assert.throws(() => learner("stranger"), /belongs to another run/);
      assert.equal(learner(...off).store.private().round, 2);
      learner(...run); // the first one again, or one that followed it once the other was called off
      assert.deepEqual([store.private().run, store.private().round], ["first", 1]);
    }
    stage(2, ...off); // called off before it was in force
    await assert.rejects(learner(...first).learn(2, "", undefined, 2), /another one by now/);
    assert.deepEqual([store.private().run, store.trained()], ["first", null]);
    fs.rmSync(store.at("private.bin"));
    stage(2, ...off); // the first that it learned: there is none before
    store.publish();
    learner(...first);
    assert.equal(store.private(), null);
  } finally {
    fs.rmSync(store.folder, { recursive: true });
  }
});
