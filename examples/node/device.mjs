#!/usr/bin/env node
// A device of a Talaria fleet: node device.mjs device.json. Prints what happens, a line of JSON each.
// With --leave it leaves the fleet for good, and takes part no more.
import { randomBytes } from "node:crypto";
import fs from "node:fs";
import path from "node:path";
import { performance } from "node:perf_hooks";
import { fileURLToPath } from "node:url";
import mqtt from "mqtt";
import { configOf, requireThere, withoutSecrets } from "./config.mjs";
import { opened } from "./kit.mjs";
import { Learner, runOf } from "./learner.mjs";
import { Machine, newState } from "./machine.mjs";
import { Store } from "./store.mjs";
import { chunkWithin, describe, sha256, signerOf, topicsOf } from "./wire.mjs";

const FAREWELL_S = 30;
const UNANSWERED_S = 60;
const [SHORTEST_S, LONGEST_S, STEADY] = [1, 60, 8];

/** The keys that `talaria edge join` made, or none. */
function identityOf(folder, fleet, device) {
  if (!folder) return {};
  const read = (name) => {
    try {
      return fs.readFileSync(path.join(folder, name));
    } catch (problem) {
      throw new Error(`identity: ${path.join(folder, name)} cannot be read (${problem.message}); name the folder that \`talaria edge join\` made, once it has the operator's answer`);
    }
  };
  const facts = JSON.parse(read("fleet.json"));
  if (facts.fleet !== fleet || facts.device !== device) throw new Error(`identity: ${folder} belongs to ${facts.device} of ${facts.fleet}`);
  for (const name of ["tls.key", "sign.key"])
    if (read(name) && fs.statSync(path.join(folder, name)).mode & 0o077) throw new Error(`identity: others may read ${folder}/${name}; chmod 600`);
  return {
    signer: signerOf(read("sign.key")),
    coordinatorKey: Buffer.from(facts.coordinator, "hex"),
    tls: { ca: read("ca.crt"), cert: read("tls.crt"), key: read("tls.key") },
  };
}

const ONWARD_MS = 1000; // so long a broker may take to send on what it has acknowledged

class Device {
  #client = null;
  #flying = new Map();
  #there = new Map(); // when the broker acknowledged what has a name
  #largest = Infinity;
  #tries = 0;
  #calls = []; // works one after another: one round is trained at a time
  #working = false;
  #finishing = false;
  #result = null;
  #answered = false;
  #begun = performance.now() / 1000;
  #firstGoodbye = Infinity;
  #lastGoodbye = -Infinity;
  #learner = null;
  #cannot = "";
  #called = null;

  constructor(config, leaving = false) {
    this.config = config;
    this.leaving = leaving;
    this.store = new Store(config.state);
    if (this.store.read("left.json").length)
      throw new Error(`this device has left its fleet for good; to take part again, its operator readmits it (\`talaria coordinator readmit\`), and ${this.store.at("left.json")} is deleted`);
    if (!leaving) requireThere(config, ["data", "kit"]);
    const { tls, ...keys } = identityOf(config.identity, config.fleet, config.device);
    this.tls = tls;
    const own = {
      fleet: config.fleet,
      device: config.device,
      profile: Buffer.from(JSON.stringify({ language: "JavaScript", node: process.version })),
      process: randomBytes(16),
      retry: config.retry_s ?? 2,
      maxModel: config.max_model ?? 512 * 2 ** 20,
      ...keys,
    };
    this.machine = new Machine(own, this.store.sealed("protocol.bin") ?? newState(), this, () => performance.now() / 1000);
    this.topics = topicsOf(config.fleet, config.device);
    this.ended = new Promise((resolve, reject) => Object.assign(this, { resolve, reject }));
  }

  tell(event, facts = {}) {
    try {
      fs.writeSync(1, `${JSON.stringify({ at: Date.now() / 1000, device: this.config.device, event, ...facts })}\n`);
    } catch {
      // The journal's disk is full, or nobody reads it any more: a line is missing there, and learning goes on.
    }
  }

  /** Takes part until the last round; what came of it. */
  async run() {
    const { state } = this.machine;
    const model = this.store.read("model.bin");
    const done = this.store.trained();
    this.bytes = done ? Buffer.from(done.update) : Buffer.alloc(0);
    const digest = model.length ? sha256(model) : Buffer.alloc(0);
    this.machine.begin(digest, this.store.found("model", state.fetch?.cut), sha256(this.bytes));
    this.#connect();
    const ticking = setInterval(() => this.#guarded(() => this.#tick()), (this.machine.own.retry * 1000) / 2);
    try {
      return await this.ended;
    } finally {
      clearInterval(ticking);
      clearTimeout(this.again);
    }
  }

  /** What fails here is the device's end: a full disk, say. What was durable stays so. */
  #guarded(work) {
    try {
      work();
    } catch (problem) {
      this.reject(problem);
    }
  }

  // ---- the link --------------------------------------------------------------------------------------------------

  #connect() {
    const { broker, fleet, device, username, password_file: secret } = this.config;
    const early = [];
    const client = mqtt.connect(broker, {
      clientId: `${fleet}.${device}`,
      protocolVersion: this.config.mqtt ?? 4,
      clean: true,
      keepalive: 30,
      reconnectPeriod: 0,
      connectTimeout: 10_000,
      username,
      password: secret && fs.readFileSync(secret, "utf8").trim(),
      will: { topic: this.topics.state, payload: this.machine.connecting(), qos: 1, retain: true },
      minVersion: "TLSv1.2",
      ...(username === undefined && this.tls), // a broker that asks for a name has a certificate of others
    });
    this.#client = client;
    this.#flying.clear();
    let [up, reached, reason, begun] = [false, false, "closed", 0];
    client.on("connect", (answer) => {
      reached = true;
      this.#largest = answer.properties?.maximumPacketSize ?? Infinity;
      client.subscribe(this.topics.filters, { qos: 1 }, (problem) =>
        this.#guarded(() => {
          if (problem) {
            reason = problem.message;
            client.end(true);
            return;
          }
          [up, begun] = [true, performance.now()];
          this.tell("connected", { broker: withoutSecrets(broker) });
          this.machine.connected();
          for (const one of early.splice(0)) this.machine.received(...one);
        }),
      );
    });
    client.on("message", (topic, payload, packet) =>
      this.#guarded(() => {
        if (up) this.machine.received(topic, payload, packet.retain);
        else early.push([topic, payload, packet.retain]);
      }),
    );
    client.on("error", (problem) => {
      reason = problem.message;
    });
    client.once("close", () => {
      client.end(true);
      if (client !== this.#client) return;
      this.#client = null;
      this.machine.disconnected();
      if (up && performance.now() - begun >= 1000 * STEADY * SHORTEST_S) this.#tries = 0;
      const most = reached ? STEADY * SHORTEST_S : LONGEST_S;
      const wait = Math.min(most, SHORTEST_S * 2 ** Math.min(this.#tries++, 32)) * (0.5 + Math.random() / 2);
      this.tell(up ? "disconnected" : "unreachable", { error: reason, retry_s: wait });
      this.again = setTimeout(() => this.#guarded(() => this.#connect()), 1000 * wait);
    });
  }

  /** What came is not what was named: try again, but not without end in one breath. */
  #later(work) {
    setTimeout(() => this.#guarded(work), 1000 * this.machine.own.retry);
  }

  reconnect(reason) {
    this.tell("catching-up", { reason });
    this.#client?.end(true);
  }

  publish(topic, payload, retain, name) {
    const client = this.#client;
    if (!client?.connected) return; // dropped: what still waits for an answer is said again
    const key = name ?? Symbol(topic);
    this.#flying.set(key, performance.now());
    client.publish(topic, payload, { qos: 1, retain }, () => {
      this.#flying.delete(key);
      if (name === undefined) return;
      for (const [one, at] of this.#there) if (performance.now() - at > ONWARD_MS) this.#there.delete(one);
      this.#there.set(name, performance.now());
    });
  }

  /** Whether a message of this name is on its way: to the broker, which takes long over a thin link, or on from there. */
  flying(name) {
    return this.#flying.has(name) || performance.now() - (this.#there.get(name) ?? -Infinity) < ONWARD_MS;
  }

  #tick() {
    const [oldest] = this.#flying.values();
    if (oldest !== undefined && performance.now() - oldest > 1000 * UNANSWERED_S) this.#client?.end(true);
    this.machine.tick();
    this.#finishIfOver();
    if (!this.#result && !this.leaving) return;
    const now = performance.now() / 1000;
    if (this.#answered || (!this.leaving && now - this.#firstGoodbye >= FAREWELL_S)) {
      this.#leave();
    } else if (this.leaving && now - this.#begun >= FAREWELL_S) {
      this.reject(new Error(`the fleet was not reached in ${FAREWELL_S} s: this device belongs to it still; try again later`));
      this.#client?.end(true);
      this.#client = null;
    } else if (now - this.#lastGoodbye >= this.machine.own.retry) {
      this.#firstGoodbye = Math.min(this.#firstGoodbye, now);
      this.#lastGoodbye = now;
      if (this.leaving) this.machine.leave();
      else this.machine.goodbye();
    }
  }

  #leave() {
    if (this.leaving) {
      this.store.write("left.json", JSON.stringify({ fleet: this.config.fleet, at: Date.now() / 1000 }));
      this.tell("left", { fleet: this.config.fleet });
      this.#result = {};
    }
    const client = this.#client;
    this.#client = null;
    clearTimeout(this.again);
    if (!client?.connected) {
      client?.end(true);
      this.resolve(this.#result);
      return;
    }
    const bye = () => client.end(false, () => this.resolve(this.#result));
    client.publish(this.topics.state, this.machine.birth(false), { qos: 1, retain: true }, bye);
  }

  // ---- what the machine asks for ---------------------------------------------------------------------------------

  save() {
    this.store.seal("protocol.bin", this.machine.state);
  }

  update(offset, length) {
    return this.bytes.subarray(offset, offset + length);
  }

  keep(what, cut, index, data) {
    this.store.keep(what, cut, index, data);
  }

  discard(what, cut) {
    this.store.remove(this.store.part(what, cut));
  }

  complete(version, cut) {
    // Not within the machine's own step: what follows from it is an event of its own.
    setImmediate(() =>
      this.#guarded(() => {
        if (this.machine.state.fetch?.cut.sha256 !== cut.sha256) return;
        if (this.store.adopt("model", cut)) {
          this.tell("model", { version, bytes: cut.size });
          this.machine.modelStored(Buffer.from(cut.sha256));
        } else {
          this.#later(() => this.machine.modelDamaged(cut.sha256, this.store.found("model", cut)));
        }
        this.#finishIfOver();
      }),
    );
  }

  coordinator(online, spec) {
    if (!online) {
      this.tell("coordinator-away");
      return;
    }
    if (this.leaving) return; // whatever is learned, it is not learned here
    if (!this.#learner || !spec.equals(this.spec)) {
      this.spec = spec;
      [this.#learner, this.#cannot] = [null, ""];
      try {
        this.#equip(runOf(spec));
      } catch (problem) {
        this.#refuse(`the run cannot be learned here: ${problem.message}`);
      }
    } else this.#tellRun();
    setImmediate(() => this.#guarded(() => this.#begin()));
  }

  #tellRun() {
    const { algorithm, rounds } = this.#learner.run;
    this.tell("coordinator", { algorithm, rounds });
  }

  #refuse(reason) {
    this.#cannot = reason;
    this.tell("error", { error: reason });
  }

  // ---- the run's kit ---------------------------------------------------------------------------------------------

  /** Learn `run` with the kit that lies here; without one, ask the coordinator for it. */
  #equip(run) {
    const given = this.config.kit;
    let kit;
    try {
      kit = opened(given ?? this.store.at("kit.bin"), run);
    } catch (problem) {
      if (given) throw problem;
      this.wanted = run;
      this.tell("kit-wanted");
      this.machine.needKit();
      return;
    }
    this.#learner = new Learner(this.config, this.store, run, kit);
    this.#tellRun();
  }

  kitBegun(cut) {
    this.machine.kitFound(cut.sha256, this.store.found("kit", cut));
  }

  kitComplete(cut) {
    // Not within the machine's own step: what follows from it is an event of its own.
    setImmediate(() =>
      this.#guarded(() => {
        if (!this.store.adopt("kit", cut)) {
          this.#later(() => this.machine.kitFound(cut.sha256, this.store.found("kit", cut)));
          return;
        }
        this.machine.kitStored();
        this.tell("kit", { bytes: cut.size });
        try {
          const run = this.wanted;
          this.#learner = new Learner(this.config, this.store, run, opened(this.store.at("kit.bin"), run));
          this.#tellRun();
        } catch (problem) {
          this.#refuse(`the run cannot be learned here: ${problem.message}`);
        }
        this.#begin();
      }),
    );
  }

  kitRefused(reason) {
    this.#refuse(`there is no kit to learn the run from: ${reason}`);
    setImmediate(() => this.#guarded(() => this.#begin()));
  }

  train(job) {
    this.#called = job;
    this.#finishing = false;
    setImmediate(() => this.#guarded(() => this.#begin()));
  }

  receipt({ attempt, outcome, reason }) {
    // Nobody says of the last round of an asynchronous run what counted; what was refused is not to be gone on from.
    if (outcome === "stored") this.store.publish();
    else if (outcome !== "late") this.store.discard();
    this.tell("received", { attempt, outcome, reason });
    setImmediate(() => this.#guarded(() => this.#finishIfOver()));
  }

  released() {
    this.#answered = true;
  }

  told(text) {
    this.tell("notice", { reason: text });
  }

  refused(topic, reason) {
    this.tell("refused", { topic: topic.slice(0, 160), reason });
  }

  // ---- learning --------------------------------------------------------------------------------------------------

  /** Learn what was asked for, once the run is known: after a restart the request may come first. */
  #begin() {
    const job = this.#called;
    if (!job || (!this.#learner && !this.#cannot)) return;
    this.#called = null;
    if (this.#cannot) {
      this.tell("declined", { attempt: job.attempt, reason: this.#cannot });
      this.machine.decline(job.attempt, this.#cannot);
      return;
    }
    const learner = this.#learner;
    this.#work(() => this.#learn(learner, job));
  }

  async #learn(learner, { attempt, digest, spec, epoch }) {
    const current = () => this.machine.state.job;
    if (current().attempt !== attempt || current().phase !== "training") return;
    let update;
    try {
      const { round, after, secure } = JSON.parse(spec);
      if (!Number.isInteger(round) || round < 1) throw new Error(`the request for work names no round (${spec.slice(0, 60)})`);
      if (secure) throw new Error("a secure round, which this device knows nothing of: it would show its update bare");
      this.tell("training", { attempt, round });
      update = await learner.learn(round, digest.toString("hex"), after, epoch);
    } catch (problem) {
      this.tell("error", { attempt, error: problem.message });
      this.machine.decline(attempt, problem.message);
      return;
    }
    const job = current();
    if (job.attempt !== attempt || !job.digest.equals(digest)) return; // another round began meanwhile
    this.bytes = update;
    this.tell("trained", { attempt, update_bytes: update.length });
    try {
      this.machine.updateReady(attempt, describe(update, chunkWithin(this.#largest, this.machine.state.chunk)));
    } catch (problem) {
      this.tell("error", { attempt, error: problem.message });
      this.machine.decline(attempt, problem.message);
    }
  }

  #finishIfOver() {
    const { job, fetch, version } = this.machine.state;
    const busy = job && ["fetching", "training", "offering"].includes(job.phase);
    const learner = this.#learner;
    if (!learner || this.#finishing || busy || version < learner.run.rounds) return;
    if (fetch) this.machine.fetchModel();
    if (fetch || !this.machine.modelDigest.length) return;
    this.#finishing = true;
    this.#work(async () => {
      let found;
      try {
        found = await learner.finish(this.machine.modelDigest.toString("hex"));
      } catch (problem) {
        found = { error: problem.message };
      }
      this.store.write("result.json", JSON.stringify({ device: this.config.device, ...found }, null, 2));
      this.tell("done", found);
      this.#result = found;
    });
  }

  #work(call) {
    this.#calls.push(call);
    if (this.#working) return;
    this.#working = true;
    (async () => {
      while (this.#calls.length) await this.#calls.shift()();
      this.#working = false;
    })().catch((problem) => this.reject(problem));
  }
}

const USAGE = "usage: node device.mjs device.json [--leave] [--insecure]; README.md says what stands in the file";

if (process.argv[1] && fs.realpathSync(process.argv[1]) === fileURLToPath(import.meta.url)) {
  const given = process.argv.slice(2);
  const files = given.filter((word) => !["--leave", "--insecure"].includes(word));
  try {
    if (files.length !== 1 || files[0].startsWith("-")) throw new Error(USAGE);
    const config = configOf(files[0], { insecure: given.includes("--insecure") });
    await new Device(config, given.includes("--leave")).run();
  } catch (problem) {
    process.stderr.write(`${problem.message}\n`);
    process.exitCode = 1;
  }
}
