// What device.json says, read and checked before anything begins; a wrong field is named with its value and the mend.
import fs from "node:fs";
import path from "node:path";

const NEEDED = ["device", "fleet", "broker", "data"];
const TEXTS = [...NEEDED, "state", "kit", "identity", "username", "password_file"];
const NUMBERS = ["retry_s", "max_model"];
const FIELDS = [...TEXTS, ...NUMBERS, "mqtt"];
const FILES = ["state", "data", "kit", "identity", "password_file"];
const SECURE = { "mqtt:": false, "mqtts:": true, "ws:": false, "wss:": true };
const HERE = /^(localhost|127(\.\d+){3}|\[::1\])$/;

const shown = (value) => JSON.stringify(value)?.slice(0, 80);

/** A broker's address without the name and password that it may hold. */
export const withoutSecrets = (broker) => broker.replace(/\/\/.*@/s, "//");

/** The broker's URL, where it is one. */
function linkOf(broker) {
  try {
    const url = new URL(broker);
    return url.protocol in SECURE && url.hostname ? url : null;
  } catch {
    return null;
  }
}

/** Throws where a file that is named is not there. */
export function requireThere(config, names) {
  for (const name of names)
    if (config[name] !== undefined && !fs.existsSync(config[name]))
      throw new Error(`${name}: ${config[name]} is not there; put it there, or correct the settings`);
}

/** The settings in a JSON file; paths are relative to it. `insecure` accepts a broker beyond this machine without TLS or keys. */
export function configOf(file, { insecure = false } = {}) {
  let config;
  try {
    config = JSON.parse(fs.readFileSync(file, "utf8"));
  } catch (problem) {
    throw new Error(`${file}: cannot be read as JSON (${problem.message}); README.md shows what stands in it`);
  }
  const wrong = (what) => new Error(`${file}: ${what}`);
  if (typeof config !== "object" || config === null || Array.isArray(config)) throw wrong("holds no object; README.md shows one");
  for (const name of Object.keys(config))
    if (!FIELDS.includes(name)) throw wrong(`${name.slice(0, 80)} is no field; there are ${FIELDS.join(", ")}`);
  for (const name of NEEDED) if (config[name] === undefined) throw wrong(`${name} is missing; README.md says what it is`);
  for (const name of TEXTS)
    if (config[name] !== undefined && (typeof config[name] !== "string" || !config[name]))
      throw wrong(`${name}=${shown(config[name])} must be a text`);
  for (const name of NUMBERS)
    if (config[name] !== undefined && !(Number.isFinite(config[name]) && config[name] > 0))
      throw wrong(`${name}=${shown(config[name])} must be a number above 0`);
  if (![undefined, 4, 5].includes(config.mqtt)) throw wrong(`mqtt=${shown(config.mqtt)} must be 4 (MQTT 3.1.1) or 5`);
  const url = linkOf(config.broker);
  if (!url) throw wrong(`broker=${shown(withoutSecrets(config.broker))} is no MQTT URL; write mqtt://host:1883, mqtts://, ws:// or wss://`);
  const risk = "or accept the risk with --insecure";
  if (!HERE.test(url.hostname) && !insecure) {
    if (!SECURE[url.protocol])
      throw wrong(`broker: ${url.host} is beyond this machine and without TLS, so that anybody on the way could read and alter all that is said; write mqtts:// or wss://, ${risk}`);
    if (config.identity === undefined)
      throw wrong(`identity is missing: without keys anybody who reaches the broker at ${url.host} could take the coordinator's place; name the folder that \`talaria edge join\` made, ${risk}`);
  }
  config.state ??= path.join("state", config.device);
  for (const name of FILES) if (config[name] !== undefined) config[name] = path.resolve(path.dirname(file), config[name]);
  requireThere(config, ["identity", "password_file"]);
  const secret = config.password_file;
  if (secret !== undefined && config.username === undefined) throw wrong("username is missing, whose password is in password_file");
  if (secret !== undefined && fs.statSync(secret).mode & 0o077) throw wrong(`password_file: others may read ${secret}; chmod 600`);
  return config;
}
