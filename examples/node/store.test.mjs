// What this device keeps where a disk fills up: node --test store.test.mjs
import assert from "node:assert/strict";
import fs from "node:fs";
import os from "node:os";
import path from "node:path";
import { test } from "node:test";
import { Store } from "./store.mjs";
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
