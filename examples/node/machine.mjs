// The device's half of the protocol, as docs/PROTOCOL.md has it: what is heard, what is remembered, what is said again.
// It does no input or output of its own: `world` carries out what it asks for, in order, and at once.
import {
  bitsOf, countOf, decodeFrame, decodeMessage, describe, encodeFrame, encodeMessage, fits, fresh, indicesOf, placeOf,
  sha256, signedBy, topicsOf, transferOf, WireError,
} from "./wire.mjs"; // prettier-ignore

const HELLO_S = 60;
const STRIKES = 20;
const same = (a, b) => Buffer.compare(Buffer.from(a), Buffer.from(b)) === 0;
const cutOf = ({ size, chunk, sha256: digest, hashes }) => ({ size, chunk, sha256: digest, hashes });
const NONE = Buffer.alloc(0);

/** A new device's memory. Its boots count from the clock: an earlier life, now forgotten, may have connected often. */
export const newState = () => ({
  boot: Date.now(),
  epoch: 0,
  seen: { boot: 0, high: 0, late: [] },
  version: -1,
  chunk: 120 * 1024,
  credit: 8,
  retry: 0,
  maxUpdate: 2 ** 32,
  fetch: null, // {version, cut}
  job: null, // {attempt, version, digest, spec, epoch, phase, cut, reason, outcome}
});

/** What has come of one transfer, and what was asked for. */
class Arrival {
  have = new Set();
  asked = new Set();
  wrong = 0;
  slowest = 0; // seconds that a chunk took at most
  tries = 0; // how often chunks were asked for again since one came

  constructor(cut, now, chunks = []) {
    Object.assign(this, { cut, touched: now, since: now, have: new Set(chunks) });
  }

  get transfer() {
    return transferOf(this.cut.sha256);
  }

  get whole() {
    return this.have.size === countOf(this.cut);
  }

  /** Whether this chunk is new; an error where it is wrong. */
  take({ header: { idx, off }, payload }, now) {
    const [offset] = placeOf(this.cut, idx);
    this.asked.delete(idx);
    if (offset !== off || !fits(this.cut, idx, payload)) {
      this.wrong += 1;
      throw new WireError(`chunk ${idx} does not match the manifest`);
    }
    this.touched = now;
    if (this.have.has(idx)) return false;
    Object.assign(this, { slowest: Math.max(this.slowest, now - this.since), tries: 0, since: now });
    return Boolean(this.have.add(idx));
  }

  /** Seconds without a chunk after which it is asked for again: one over a thin link must come in time. */
  patience(wait) {
    const first = Math.min(10, Math.min(this.cut.chunk, this.cut.size) / 16384);
    return Math.max(wait, Math.min(60, 2 ** this.tries * (2 * this.slowest || first)));
  }

  overdue(now, wait) {
    return now - this.touched >= this.patience(wait);
  }

  /** The bitmap to ask for now: half a window more once half of the last one came, or, `again`, all that is missing of it. */
  window(credit, now, again = false) {
    if (again) {
      this.asked.clear();
      this.tries += 1;
    } else if (!this.asked.size) this.since = now;
    if (this.whole || this.asked.size > credit / 2) return null;
    const count = countOf(this.cut);
    const ask = [];
    for (let index = 0; index < count && ask.length < credit - this.asked.size; index++)
      if (!this.have.has(index) && !this.asked.has(index)) ask.push(index);
    if (!ask.length) return null;
    for (const index of ask) this.asked.add(index);
    this.touched = now;
    return bitsOf(ask, count);
  }
}

export class Machine {
  #linked = false;
  #online = false;
  #said = 0;
  #greeted = -Infinity;
  #jobSaid = -Infinity;
  #model = null; // the Arrival of state.fetch
  #wanted = false; // whether it is, though no round asks for it
  #kit = null; // {asked, arrival} while one is wanted

  /** `now` gives seconds of a clock that never goes back; `own` is {fleet, device, profile, process, signer?, coordinatorKey?, retry, maxModel}. */
  constructor(own, state, world, now) {
    Object.assign(this, { own, state, world, now });
    this.topics = topicsOf(own.fleet, own.device);
    this.modelDigest = NONE;
    if (state.job) state.job.digest = Buffer.from(state.job.digest);
  }

  get linked() {
    return this.#linked;
  }

  // ---- what the program says -------------------------------------------------------------------------------------

  /** After a start: what lies on flash. `chunks` are the intact ones of the transfer, `update` the sha256 of what can be offered. */
  begin(modelDigest, chunks, update) {
    const { state } = this;
    this.modelDigest = modelDigest;
    if (state.fetch && same(state.fetch.cut.sha256, modelDigest)) state.fetch = null;
    this.#model = state.fetch && new Arrival(state.fetch.cut, this.now(), chunks);
    if (this.#model?.whole) this.world.complete(state.fetch.version, state.fetch.cut);
    const { job } = state;
    if (!job) return;
    if (job.cut && !same(job.cut.sha256, update)) {
      job.cut = null; // it is not on flash any more, and is trained again
      if (job.phase === "offering") job.phase = "fetching";
    }
    if (job.phase === "fetching" || job.phase === "training") {
      job.phase = "fetching";
      this.#train();
    }
  }

  /** Before each attempt to connect; gives the last will's payload, whose boot is durable by then. */
  connecting() {
    this.state.boot += 1;
    this.#said = 0;
    this.#linked = false;
    this.world.save();
    return this.birth(false);
  }

  connected() {
    this.#linked = true;
    this.#greet();
    this.#again();
  }

  disconnected() {
    this.#linked = false;
  }

  modelStored(digest) {
    this.modelDigest = digest;
    if (this.state.fetch && same(this.state.fetch.cut.sha256, digest)) this.state.fetch = this.#model = null;
    this.world.save();
    this.#train();
  }

  modelDamaged(digest, chunks) {
    if (!this.state.fetch || !same(this.state.fetch.cut.sha256, digest)) return;
    this.#model.have = new Set(chunks);
    if (this.#model.whole) this.world.complete(this.state.fetch.version, this.state.fetch.cut);
    else this.#want(true);
  }

  /** From now on the run's kit is wanted. */
  needKit() {
    this.#kit ??= { asked: -Infinity, arrival: null };
    this.#wantKit(true);
  }

  /** Which of its chunks lie intact on flash. */
  kitFound(digest, chunks) {
    const arrival = this.#kit?.arrival;
    if (!arrival || !same(arrival.cut.sha256, digest)) return;
    arrival.have = new Set(chunks);
    if (arrival.whole) this.world.kitComplete(arrival.cut);
    else this.#wantKit(true);
  }

  kitStored() {
    this.#kit = null;
  }

  updateReady(attempt, cut) {
    const { job } = this.state;
    if (!job || job.attempt !== attempt || !["training", "fetching"].includes(job.phase)) return;
    Object.assign(job, { phase: "offering", cut });
    this.world.save();
    this.#offer();
  }

  decline(attempt, reason) {
    const { job } = this.state;
    if (!job || job.attempt !== attempt || !["fetching", "training"].includes(job.phase)) return;
    this.#refuse(job, [...reason].slice(0, 300).join(""));
  }

  goodbye() {
    this.#say("goodbye", { version: Math.max(0, this.state.version) });
  }

  /** For good, by its owner's hand. */
  leave() {
    this.#say("leave", {});
  }

  /** Time passed. */
  tick() {
    if (!this.#linked) return;
    const { job } = this.state;
    const [now, wait] = [this.now(), this.#patience()];
    const idle = !job || job.phase === "done" || job.phase === "refused";
    if (idle && now - this.#greeted >= HELLO_S) {
      this.#greet();
      if (job?.phase === "refused") this.#repeat();
    }
    if (job?.phase === "offering" && now - this.#jobSaid >= wait) this.#offer();
    const kit = this.#kit;
    if (kit && (kit.arrival ? kit.arrival.overdue(now, wait) : now - kit.asked >= wait)) this.#wantKit(true);
    if (this.#needed()) {
      if (this.#model.overdue(now, wait)) this.#want(true);
    } else if (job?.phase === "fetching" && now - this.#jobSaid >= wait) {
      this.#jobSaid = now;
      this.#want();
    }
  }

  // ---- what arrives ----------------------------------------------------------------------------------------------

  received(topic, payload, retained) {
    const kind = this.topics.kind(topic);
    try {
      if (!kind) throw new WireError("not a topic of this device");
      if (retained && ["m", "cmd", "dn"].includes(kind)) throw new WireError("a retained message that somebody planted");
      if (!payload.length && kind.startsWith("co/")) return;
      const frame = decodeFrame(payload);
      const { fleet, device } = frame.header;
      if (fleet !== this.own.fleet || device !== (kind === "cmd" || kind === "dn" ? this.own.device : ""))
        throw new WireError("a frame for somebody else");
      if (kind === "m" || kind === "dn") this.#chunk(frame);
      else this.#heard(kind, frame, retained);
    } catch (problem) {
      if (!(problem instanceof WireError)) throw problem;
      this.world.refused(topic, problem.message);
    }
  }

  #heard(kind, frame, retained) {
    const { state } = this;
    const { type, boot: epoch, seq } = frame.header;
    if (this.own.coordinatorKey && !signedBy(frame, this.own.coordinatorKey))
      throw new WireError(`${type} is not signed by the coordinator`);
    if (epoch < state.epoch) throw new WireError(`${type} of epoch ${epoch}, which another coordinator took over from`);
    const message = decodeMessage(frame);
    if (epoch > state.epoch) {
      Object.assign(state, { epoch, version: -1 });
      this.#online = false;
      this.world.save();
    }
    if (kind === "co/state") {
      if (type !== "co") throw new WireError(`${type} on the coordinator's topic`);
      const { chunk, credit, retry, max_update: maxUpdate } = message;
      Object.assign(state, { chunk, credit: Math.min(credit, 8), retry, maxUpdate });
      const came = message.online && !this.#online;
      this.#online = message.online;
      this.world.coordinator(message.online, Buffer.from(message.spec));
      if (came) this.#again();
    } else if (kind === "co/model") this.#manifest(type, message, retained);
    else if (fresh(state.seen, epoch, seq)) this.#command(type, message);
  }

  #command(type, message) {
    const { state } = this;
    const { job } = state;
    switch (type) {
      case "work":
        this.#work(message);
        break;
      case "model":
        this.#manifest(type, message, true);
        break;
      case "kit":
        if (this.#kit) this.#kitNamed(message); // else it is said twice, and here by now
        break;
      case "nokit":
        if (this.#kit) this.#kitRefused(message.reason);
        break;
      case "rebirth":
        if (state.boot > message.above) {
          this.#greet();
          break;
        }
        state.boot = message.above;
        this.world.save();
        this.world.reconnect(`boot ${message.above} of this device was heard before`);
        break;
      case "grant":
      case "need":
        if (job?.phase !== "offering" || job.attempt !== message.attempt || message.xfer !== transferOf(job.cut.sha256)) break;
        this.#jobSaid = this.now();
        this.#send(job, indicesOf(message.bitmap, countOf(job.cut)).slice(0, message.credit));
        break;
      case "receipt":
        if (job?.phase !== "offering" || job.attempt !== message.attempt || !same(job.cut.sha256, message.sha256)) break;
        Object.assign(job, { phase: "done", outcome: message.outcome, reason: message.reason });
        this.world.save();
        this.world.receipt(job);
        break;
      case "abort":
        if (!job || job.attempt !== message.attempt || job.phase === "done") break;
        Object.assign(job, { phase: "done", outcome: "late", reason: message.reason });
        this.world.save();
        this.world.receipt(job);
        break;
      case "told":
      case "heard":
        break; // of a secure round, which was declined
      case "farewell":
        this.world.released();
        break;
      case "notice":
        this.world.told(message.text);
        break;
      case "error":
        this.world.told(message.reason);
        break;
      default:
        throw new WireError(`${type} is not for a coordinator to say`);
    }
  }

  #work(work) {
    const { state } = this;
    const { job } = state;
    const newer = job !== null && job.epoch < state.epoch; // its coordinator may have gone back to an older record
    if (job && work.attempt === job.attempt) {
      const again = work.version === job.version && same(work.model_digest, job.digest);
      if (again && !(newer && job.phase === "done" && !job.cut)) {
        if (newer && job.phase === "done") job.phase = "offering";
        job.epoch = state.epoch;
        this.#repeat();
        return;
      }
      if (!newer) throw new WireError(`attempt ${work.attempt} is asked again, from another global model`);
    }
    if (job && work.attempt < job.attempt && !newer) throw new WireError(`attempt ${work.attempt} is an old one`);
    state.job = {
      attempt: work.attempt,
      version: work.version,
      digest: Buffer.from(work.model_digest),
      spec: Buffer.from(work.spec).toString(),
      epoch: state.epoch,
      phase: "fetching",
      cut: null,
      reason: "",
      outcome: "",
    };
    this.world.save();
    this.#say("accept", { attempt: work.attempt });
    this.#train();
    this.#jobSaid = this.now();
    if (state.job.phase === "fetching") this.#want(); // what came by multicast came before
  }

  // ---- the global model ------------------------------------------------------------------------------------------

  #manifest(type, message, atOnce) {
    const { state } = this;
    if (type !== "model") throw new WireError(`${type} on the model's topic`);
    if (message.version < state.version) throw new WireError(`global model ${message.version} is an old one`);
    if (message.size > this.own.maxModel) throw new WireError(`a global model of ${message.size} bytes is too large`);
    state.version = message.version;
    const cut = cutOf(message);
    const known = state.fetch && same(state.fetch.cut.hashes, cut.hashes) && state.fetch.cut.chunk === cut.chunk;
    const here = same(message.sha256, this.modelDigest); // then what is on its way was called off
    if (here ? !state.fetch : known) return;
    if (state.fetch) this.world.discard("model", state.fetch.cut);
    state.fetch = here ? null : { version: message.version, cut };
    this.#model = state.fetch && new Arrival(cut, this.now());
    if (this.#model && atOnce) this.#model.touched = -Infinity; // no multicast is on its way
    this.#wanted = false;
    this.world.save();
    if (this.#model && atOnce) this.#want();
  }

  #chunk(frame) {
    const { fetch } = this.state;
    const { type, xfer } = frame.header;
    if (type !== "chunk") throw new WireError(`${type} on a topic of chunks`);
    const ofKit = this.#kit?.arrival?.transfer === xfer;
    const arrival = ofKit ? this.#kit.arrival : this.#model;
    if (!arrival || arrival.whole || xfer !== arrival.transfer) return;
    const asked = arrival.asked.size;
    try {
      if (!arrival.take(frame, this.now())) return;
    } catch (problem) {
      const attempt = this.state.job?.attempt ?? 0;
      if (arrival.wrong === STRIKES) this.#say("error", { attempt, reason: `${STRIKES} wrong chunks of ${xfer}` });
      throw problem;
    }
    this.world.keep(ofKit ? "kit" : "model", arrival.cut, frame.header.idx, frame.payload);
    if (arrival.whole) ofKit ? this.world.kitComplete(arrival.cut) : this.world.complete(fetch.version, fetch.cut);
    else if (ofKit) this.#wantKit();
    else if (asked && this.#needed()) this.#want();
  }

  /** The newest global model is wanted here, though no round asks this device for work. */
  fetchModel() {
    if (!this.state.fetch || this.#wanted) return;
    this.#wanted = true;
    if (this.#model.overdue(this.now(), this.#patience())) this.#want();
  }

  /** Whether the model that was announced last is for this device; what comes of it by multicast is kept in any case. */
  #needed() {
    const { job, fetch } = this.state;
    return fetch !== null && (this.#wanted || (job?.phase === "fetching" && same(job.digest, fetch.cut.sha256)));
  }

  /** Ask for missing chunks, or for the manifest of the model that the job needs. */
  #want(again = false) {
    const { job, fetch, version, credit } = this.state;
    if (this.#needed()) {
      const bitmap = this.#model.window(credit, this.now(), again);
      if (bitmap) this.#say("want", { model_digest: fetch.cut.sha256, bitmap });
    } else if (job?.phase === "fetching" && !same(job.digest, this.modelDigest)) {
      if (job.version < version) this.decline(job.attempt, `global model ${job.version} was replaced by ${version}`);
      else this.#say("want", { model_digest: job.digest, bitmap: NONE });
    }
  }

  // ---- the run's kit ---------------------------------------------------------------------------------------------

  /** Ask for its manifest, or for chunks of it. */
  #wantKit(again = false) {
    const { arrival } = this.#kit;
    if (!arrival) {
      this.#kit.asked = this.now();
      this.#say("wantkit", { sha256: NONE, bitmap: NONE });
      return;
    }
    const bitmap = arrival.window(this.state.credit, this.now(), again);
    if (bitmap) this.#say("wantkit", { sha256: arrival.cut.sha256, bitmap });
  }

  #kitNamed(message) {
    const cut = cutOf(message);
    const { arrival } = this.#kit;
    if (cut.size > this.own.maxModel) {
      this.#kitRefused(`the run's kit of ${cut.size} bytes is above this device's ${this.own.maxModel}; raise max_model`);
      return;
    }
    if (arrival && same(arrival.cut.hashes, cut.hashes) && arrival.cut.chunk === cut.chunk) return;
    if (arrival) this.world.discard("kit", arrival.cut);
    this.#kit.arrival = new Arrival(cut, this.now());
    this.world.kitBegun(cut);
  }

  #kitRefused(reason) {
    this.#kit = null;
    this.world.kitRefused(reason);
  }

  #train() {
    const { job } = this.state;
    if (job?.phase !== "fetching" || !same(job.digest, this.modelDigest)) return;
    job.phase = "training";
    this.world.train(job);
  }

  // ---- what is said ----------------------------------------------------------------------------------------------

  #patience() {
    return Math.max(this.own.retry, this.state.retry);
  }

  #again() {
    const { job, fetch } = this.state;
    if (job && job.phase !== "done") this.#repeat();
    if (fetch && this.#model.asked.size) {
      this.#model.since = this.now();
      this.#want(true);
    }
    if (this.#kit) this.#wantKit(true);
  }

  #repeat() {
    const { job } = this.state;
    if (job.phase === "fetching" || job.phase === "training") this.#say("accept", { attempt: job.attempt });
    else if (job.phase === "refused") this.#say("decline", { attempt: job.attempt, reason: job.reason });
    else if (job.cut) this.#offer();
  }

  #refuse(job, reason) {
    Object.assign(job, { phase: "refused", reason });
    this.world.save();
    this.#say("decline", { attempt: job.attempt, reason });
  }

  #offer() {
    const { job, chunk, maxUpdate } = this.state;
    if (job.cut.size > maxUpdate) {
      // Also where its operator has changed that since it was offered first.
      this.#refuse(job, `update of ${job.cut.size} bytes; at most ${maxUpdate} ([rounds] max_update of its fleet)`);
      return;
    }
    if (job.cut.chunk > chunk) {
      try {
        job.cut = describe(this.world.update(0, job.cut.size), chunk); // the coordinator takes smaller ones now
      } catch (problem) {
        this.#refuse(job, problem.message);
        return;
      }
      this.world.save();
    }
    this.#jobSaid = this.now();
    const tag = Buffer.from(`${this.own.fleet}/${this.own.device}/${job.attempt}/`);
    const nonce = sha256(Buffer.concat([tag, Buffer.from(job.cut.sha256)])).subarray(0, 16);
    const { attempt, version: base_version, digest: base_digest } = job;
    this.#say("offer", { ...job.cut, nonce, attempt, base_version, base_digest });
  }

  #send(job, indices) {
    const xfer = transferOf(job.cut.sha256);
    for (const idx of indices) {
      const name = `${xfer}/${idx}`;
      if (this.world.flying(name)) continue; // it is on its way
      const [off, length] = placeOf(job.cut, idx);
      const data = this.world.update(off, length);
      if (!fits(job.cut, idx, data)) throw new WireError(`chunk ${idx} of ${xfer} changed since it was offered`);
      const { fleet, device } = this.own;
      const header = { type: "chunk", fleet, device, boot: this.state.boot, attempt: job.attempt, xfer, idx, off };
      this.world.publish(this.topics.up(xfer), encodeFrame(header, data), false, name);
    }
  }

  birth(online) {
    const { fleet, device, signer, profile, process } = this.own;
    const values = { online, key: signer?.public ?? NONE, profile, process };
    return encodeFrame({ type: "device", fleet, device, boot: this.state.boot }, encodeMessage("device", values), signer);
  }

  #greet() {
    this.#greeted = this.now();
    this.world.publish(this.topics.state, this.birth(true), true);
  }

  #say(type, values) {
    if (!this.#linked) return;
    const { fleet, device, signer } = this.own;
    const header = { type, fleet, device, boot: this.state.boot, seq: ++this.#said };
    this.world.publish(this.topics.events, encodeFrame(header, encodeMessage(type, values), signer), false);
  }
}
