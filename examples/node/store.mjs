// What a device keeps over a crash. Every file is written beside, synced and renamed: it is the old one or the new one.
import fs from "node:fs";
import path from "node:path";
import { decode, encode } from "@msgpack/msgpack";
import { countOf, fits, placeOf, sha256, transferOf } from "./wire.mjs";

const NONE = Buffer.alloc(0);

/** All of `data`: where a disk fills up a write takes a part and says no error, which the next one does. */
function writeWhole(name, flags, data, place, sync = () => {}) {
  const file = fs.openSync(name, flags, 0o600);
  try {
    for (let done = 0; done < data.length; ) done += fs.writeSync(file, data, done, data.length - done, place + done);
    sync(file);
  } catch (problem) {
    throw new Error(`${name} cannot be written (${problem.message}); free some space, and start the device again`);
  } finally {
    fs.closeSync(file);
  }
}

export class Store {
  constructor(folder) {
    this.folder = folder;
    fs.mkdirSync(folder, { recursive: true, mode: 0o700 });
  }

  at(name) {
    return path.join(this.folder, name);
  }

  write(name, data) {
    writeWhole(this.at(`${name}.next`), "w", Buffer.from(data), 0, fs.fsyncSync);
    this.#rename(`${name}.next`, name);
  }

  #rename(from, to) {
    fs.renameSync(this.at(from), this.at(to));
    const folder = fs.openSync(this.folder, "r");
    fs.fsyncSync(folder);
    fs.closeSync(folder);
  }

  read(name) {
    try {
      return fs.readFileSync(this.at(name));
    } catch (problem) {
      if (problem.code === "ENOENT") return NONE;
      throw problem;
    }
  }

  remove(name) {
    fs.rmSync(this.at(name), { force: true });
  }

  /** A value under its checksum; null where there is none. A damaged one is an error: nothing begins anew by itself. */
  sealed(name) {
    const data = this.read(name);
    if (!data.length && !fs.existsSync(this.at(name))) return null;
    if (!sha256(data.subarray(32)).equals(data.subarray(0, 32)))
      throw new Error(`${this.at(name)} is damaged; restore it from a backup, or move it away to begin anew`);
    return decode(data.subarray(32));
  }

  seal(name, value) {
    const content = Buffer.from(encode(value));
    this.write(name, Buffer.concat([sha256(content), content]));
  }

  // ---- a round: the update and the private state that it comes with ----------------------------------------------

  /** Keep a finished round. The private state in force is not touched. */
  stage(facts, update, tensors) {
    this.remove("update.bin");
    this.seal("pending.bin", { ...facts, tensors });
    this.seal("update.bin", { ...facts, update });
  }

  /** The latest finished round, in force or not, or null. */
  trained() {
    const done = this.sealed("update.bin");
    if (!done) return null;
    const fit = (state) => state && state.round === done.round && state.digest === done.digest && state.run === done.run;
    return fit(this.sealed("pending.bin")) || fit(this.private()) ? done : null;
  }

  private() {
    return this.sealed("private.bin");
  }

  /** What is staged comes into force, unless it was only half written. What was of another run is kept: it may be taken up again. */
  publish() {
    const [staged, done] = [this.sealed("pending.bin"), this.sealed("update.bin")];
    if (staged && done && staged.round === done.round && staged.digest === done.digest) {
      const held = this.private();
      if (held && held.run !== staged.run) this.write("before.bin", this.read("private.bin"));
      this.#rename("pending.bin", "private.bin");
    } else this.remove("pending.bin");
  }

  /** The state of the run before is in force again, or none where there was none; what was in force lies beside it. */
  takeBack() {
    this.discard();
    if (!fs.existsSync(this.at("before.bin"))) {
      this.#rename("private.bin", "called-off.bin");
      return;
    }
    this.write("called-off.bin", this.read("private.bin"));
    this.#rename("before.bin", "private.bin");
  }

  discard() {
    this.remove("pending.bin");
    this.remove("update.bin");
  }

  // ---- what comes in chunks: a global model, a kit ---------------------------------------------------------------

  part(what, cut) {
    return `${what}-${transferOf(cut.sha256)}.part`;
  }

  keep(what, cut, index, data) {
    const flags = fs.constants.O_RDWR | fs.constants.O_CREAT;
    writeWhole(this.at(this.part(what, cut)), flags, data, placeOf(cut, index)[0]);
  }

  /** The chunks that lie intact in the part's file, each hashed again; all other parts of its kind are removed. */
  found(what, cut) {
    const mine = cut && this.part(what, cut);
    for (const name of fs.readdirSync(this.folder))
      if (name.startsWith(`${what}-`) && name.endsWith(".part") && name !== mine) this.remove(name);
    const data = cut ? this.read(mine) : NONE;
    const every = cut ? [...Array(countOf(cut)).keys()] : [];
    return every.filter((index) => {
      const [offset, length] = placeOf(cut, index);
      return fits(cut, index, data.subarray(offset, offset + length));
    });
  }

  /** The finished part becomes `model.bin` or `kit.bin`; false where its bytes are not the manifest's. */
  adopt(what, cut) {
    const name = this.part(what, cut);
    if (!sha256(this.read(name)).equals(Buffer.from(cut.sha256))) return false;
    const file = fs.openSync(this.at(name), "r+");
    fs.fsyncSync(file);
    fs.closeSync(file);
    this.#rename(name, `${what}.bin`);
    return true;
  }
}
