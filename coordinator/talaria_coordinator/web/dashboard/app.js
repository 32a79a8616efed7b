// The dashboard: asks the API every few seconds and draws what it answers. No library, no network but its own origin.
// Everything that came from a device is set as text, never as markup.
"use strict";

const EVERY_MS = 3000;
const SVG = "http://www.w3.org/2000/svg";
const $ = (id) => document.getElementById(id);
const MOST = 200; // devices that are listed, by name
const store = (() => { try { return window.sessionStorage; } catch { return null; } })();
let token = (store && store.getItem("token")) || "";
let fleet = ""; // that is chosen
let drawn = ""; // that is on the page: orders are given to it
let refused = ""; // why the last order was
let asked = 0; // how often the page asked: what comes for an earlier time is let go
let timer = 0;

class NeedsToken extends Error {}

async function ask(path, options = {}) {
  if (/[^!-~]/.test(token)) throw new NeedsToken(); // no header could carry it
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const answer = await fetch(path, { ...options, headers, cache: "no-store" });
  if (answer.status === 401) throw new NeedsToken();
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.detail || `${answer.status} from ${path}`);
  return body;
}

// ---- drawing ------------------------------------------------------------------------------------------------------

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

function draw(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

const titled = (node, text) => { node.append(draw("title", {}, text)); return node; };

// What is drawn anew keeps the keyboard where it was: on the button of the same device.
function put(id, ...children) {
  const place = $(id), { activeElement: held } = document;
  const device = place.contains(held) && held.dataset.device;
  place.replaceChildren(...children);
  const again = device && place.querySelector(`[data-device="${device}"]`);
  if (again) again.focus({ preventScroll: true });
}

function keep(word) {
  token = word;
  try { store.setItem("token", word); } catch { /* a browser that stores nothing, or no more: it is asked for again */ }
}

const firstOf = (shown, count) => (shown.length < count ? `The first ${shown.length} of ${count} by name.` : "");
const nothing = (text) => make("div", { class: "empty" }, text);
const percent = (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(1)}\u00a0%`);

const share = (value) => (Number.isFinite(value) ? percent(value) : "–");
const spreads = (value) => (Number.isFinite(value) ? `${value.toPrecision(2)}\u00a0sd` : "–");

function bytes(n) {
  if (n < 1024) return `${n} B`;
  const units = ["KiB", "MiB", "GiB", "TiB"];
  let i = -1;
  do { n /= 1024; i += 1; } while (n >= 1024 && i < units.length - 1);
  return `${n.toFixed(n < 10 ? 2 : n < 100 ? 1 : 0)} ${units[i]}`;
}

function ago(at) {
  const s = Math.max(0, Date.now() / 1000 - at);
  if (s < 90) return `${Math.round(s)} s ago`;
  if (s < 5400) return `${Math.round(s / 60)} min ago`;
  if (s < 129600) return `${Math.round(s / 3600)} h ago`;
  return `${Math.round(s / 86400)} days ago`;
}

const clock = (at) => new Date(at * 1000).toLocaleTimeString([], { hour12: false });
const took = (r) => (r.closed === null ? "–" : `${(r.closed - r.opened).toFixed(1)} s`);

function table(columns, rows, empty) {
  if (!rows.length) return nothing(empty);
  const cell = (tag, [, , kind], content) => make(tag, kind ? { class: kind } : {}, content);
  return make("table", {},
    make("thead", {}, make("tr", {}, ...columns.map((c) => cell("th", c, c[0])))),
    make("tbody", {}, ...rows.map((row) => make("tr", {}, ...columns.map((c) => cell("td", c, c[1](row)))))));
}

function axes(width, height, left, ticks, y, format) {
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  for (const tick of ticks) {
    svg.append(draw("line", { class: "grid", x1: left, x2: width - 6, y1: y(tick), y2: y(tick) }));
    svg.append(draw("text", { x: left - 6, y: y(tick) + 4, "text-anchor": "end" }, format(tick)));
  }
  return svg;
}

function numbers(svg, rounds, x, height) {
  const every = Math.max(1, Math.ceil(rounds.length / 12));
  rounds.forEach((r, i) => {
    if (i % every === 0 || i === rounds.length - 1 && rounds.length - 1 - Math.floor(i / every) * every > every / 2) {
      svg.append(draw("text", { x: x(i), y: height - 4, "text-anchor": "middle" }, String(r.round)));
    }
  });
}

// Within a secure round's sum the mean alone is known.
function accuracyOf(round) {
  const mean = Math.max(0, round.means.val_accuracy); // R² may lie below
  return round.accuracy || (!(mean <= 1) ? null : { low: mean, median: mean, high: mean, count: round.counted, summed: true });
}

function accuracyPlot(rounds) {
  const told = rounds.map((r) => ({ round: r.round, accuracy: accuracyOf(r) })).filter((r) => r.accuracy);
  if (!told.length) return nothing("No device has told its accuracy: not every algorithm does.");
  const [w, h, left, top, foot] = [520, 200, 46, 8, 20];
  const span = w - left - 20;
  const x = (i) => left + 8 + (told.length === 1 ? span / 2 : i * span / (told.length - 1));
  const y = (v) => top + (1 - v) * (h - top - foot);
  const svg = axes(w, h, left, [0, 0.25, 0.5, 0.75, 1], y, (v) => `${100 * v} %`);
  const line = (key) => told.map((r, i) => `${x(i).toFixed(1)},${y(r.accuracy[key]).toFixed(1)}`);
  svg.append(draw("polygon", { class: "band", points: [...line("high"), ...line("low").reverse()].join(" ") }));
  svg.append(draw("polyline", { class: "mid", points: line("median").join(" ") }));
  told.forEach((r, i) => {
    const a = r.accuracy;
    svg.append(titled(draw("circle", { class: "dot", cx: x(i), cy: y(a.median), r: told.length > 40 ? 3 : 4.5 }),
      a.summed ? `round ${r.round}: mean ${percent(a.low)}, ${a.count} devices`
        : `round ${r.round}: ${percent(a.low)} to ${percent(a.high)}, median ${percent(a.median)}, ${a.count} devices`));
  });
  numbers(svg, told, x, h);
  return svg;
}

function bytesPlot(rounds) {
  const told = rounds.filter((r) => r.bytes_up > 0);
  if (!told.length) return nothing("No update has come yet.");
  const [w, h, left, top, foot] = [520, 200, 66, 8, 20];
  const most = Math.max(...told.map((r) => Math.max(r.bytes_up, r.bytes_dense)));
  const slot = (w - left - 12) / Math.max(told.length, 8);
  const x = (i) => left + 6 + (i + 0.5) * slot;
  const y = (v) => top + (1 - v / most) * (h - top - foot);
  const svg = axes(w, h, left, [0, most / 2, most], y, bytes);
  told.forEach((r, i) => {
    const bar = (kind, value, width) => draw("rect", {
      class: kind, x: x(i) - width * slot / 2, y: y(value), width: width * slot, height: Math.max(0, y(0) - y(value)) });
    const text = `round ${r.round}: ${bytes(r.bytes_up)} of ${bytes(r.bytes_dense)} dense`;
    svg.append(titled(bar("dense", r.bytes_dense, 0.84), text), titled(bar("bar", r.bytes_up, 0.5), text));
  });
  numbers(svg, told, x, h);
  return svg;
}

function overlapPlot({ devices, matrix }) {
  const n = devices.length;
  const size = Math.min(34, Math.max(14, 300 / n));
  const left = 90;
  const svg = draw("svg", { viewBox: `0 0 520 ${n * size + 6}`, role: "img" });
  devices.forEach((a, i) => {
    svg.append(draw("text", { x: left - 6, y: i * size + size / 2 + 4, "text-anchor": "end" },
      a.length > 13 ? `${a.slice(0, 12)}…` : a));
    devices.forEach((b, j) => {
      const value = matrix[i][j];
      svg.append(titled(draw("rect", { class: "cell", x: left + j * size, y: i * size, width: size, height: size,
        "fill-opacity": (0.08 + 0.92 * value).toFixed(3) }), `${a} and ${b}: ${percent(value)}`));
      if (size >= 28) {
        const ink = draw("text", { x: left + (j + 0.5) * size, y: i * size + size / 2 + 4, "text-anchor": "middle" },
          String(Math.round(100 * value)));
        if (value > 0.45) ink.style.fill = "var(--card)";
        svg.append(ink);
      }
    });
  });
  return svg;
}

// ---- the page -----------------------------------------------------------------------------------------------------

// As many tiles in each row as in the others, or nearly: no one stands alone below a full row.
function spread(count) {
  for (const [width, most] of [["wide", 8], ["middle", 4], ["small", 2]]) {
    $("tiles").style.setProperty(`--${width}`, String(Math.ceil(count / Math.ceil(count / most))));
  }
}

function tile(id, value, text, kind = "") {
  return make("div", { class: `tile ${kind}`, id: `tile-${id}` }, make("b", {}, value), make("small", {}, text));
}

function show(about, rounds, devices, shut, events, overlap) {
  const open = rounds.find((r) => r.state === "open");
  const closed = rounds.find((r) => r.state === "closed");
  const oldest = [...rounds].reverse().filter((r) => r.state !== "failed");
  drawn = about.name;
  $("status").textContent = about.status;
  $("status").className = `badge ${about.status}`;
  $("about").textContent = `${about.algorithm} · ${about.model} · epoch ${about.epoch}`;
  $("pause").disabled = about.status !== "running";
  $("resume").disabled = !["paused", "aborted"].includes(about.status);
  $("extend").disabled = about.status === "aborted";
  $("next").disabled = !["paused", "done"].includes(about.status);
  $("abort").disabled = !["running", "paused"].includes(about.status);
  const dense = closed && closed.bytes_dense ? closed.bytes_up / closed.bytes_dense : null;
  const down = closed && closed.bytes_down_dense ? closed.bytes_down / closed.bytes_down_dense : null;
  const spent = about.privacy;
  const known = closed && accuracyOf(closed);
  const moved = devices.filter((d) => d.drift);
  const furthest = (what) => Math.max(...moved.map((d) => d.drift[what]).filter((v) => v !== null));
  put("tiles",
    tile("rounds", `${about.round} / ${about.rounds}`, "rounds of learning"),
    tile("open", open ? `${open.stored} / ${open.cohort}` : "–", open ? `updates in round ${open.round}` : "no open round"),
    tile("devices", `${about.online} / ${about.devices}`, "devices online"),
    tile("quarantined", String(about.quarantined), "in quarantine", about.quarantined ? "bad" : ""),
    tile("accuracy", percent(known && known.median), `${known && known.summed ? "mean" : "median"} accuracy, last round`),
    tile("dense", percent(dense), "of dense bytes up, last round"),
    tile("down", percent(down), "of dense bytes down, last round"),
    tile("kept", percent(closed && closed.kept && closed.kept.mean), "of channels kept, mean"),
    tile("overlap", percent(closed && closed.overlap), "mask overlap, mean"),
    ...(moved.length ? [tile("drift", `${share(furthest("labels"))} / ${spreads(furthest("features"))}`,
      `labels / features moved since the first day, at most${devices.length < about.devices ? `, of the first ${devices.length}` : ""}`)] : []),
    ...(spent ? [tile("epsilon", spent.epsilon.toPrecision(3), `epsilon${spent.budget ? ` of ${spent.budget}` : ""}, delta ${spent.delta}; ${spent.form}`,
      spent.budget && spent.epsilon > 0.9 * spent.budget ? "bad" : "")] : []));
  spread($("tiles").children.length);
  const away = devices.filter((d) => !d.online && !d.retired && d.quarantine === null).map((d) => d.device);
  const idle = about.status === "running" && !open && about.round < about.rounds && away.length;
  const more = devices.length < about.devices ? " and others" : away.length > 20 ? ` and ${away.length - 20} more` : "";
  const late = about.waits_for.map((d) => `${d.device} (${d.phase}${d.online ? "" : ", away"})`);
  const words = [
    ...about.trouble.map((said) => `Trouble: ${said}.`),
    about.canary.length ? `This run is tried first by ${about.canary.join(", ")}.` : "",
    open && late.length ? `Round ${open.round} waits for ${late.join(", ")}.` : "",
    idle ? `No round is open; away: ${away.slice(0, 20).join(", ")}${more}.` : "",
  ].filter(Boolean);
  $("waits").hidden = !words.length;
  $("waits").textContent = words.join(" ");
  put("accuracy", accuracyPlot(oldest));
  put("bytes", bytesPlot(oldest));
  const masked = overlap && overlap.devices.length > 1;
  $("overlap-about").textContent = masked
    ? `Round ${closed.round}: channels that two devices both keep over those that either keeps, in percent; `
      + `the first ${overlap.devices.length} masked devices by name.` : "";
  put("overlap", masked ? overlapPlot(overlap) : nothing("No masks yet, or all devices keep the whole model."));
  $("quarantine-about").textContent = firstOf(shut, about.quarantined);
  $("devices-about").textContent = firstOf(devices, about.devices);
  put("quarantine", table([
    ["device", (d) => d.device], ["seen", (d) => ago(d.seen)],
    ["reason", (d) => d.quarantine, "text"], ["", (d) => releaseButton(d.device)],
  ], shut, "Nobody is shut out."));
  put("rounds", table([
    ["attempt", (r) => String(r.attempt), "n"], ["round", (r) => String(r.round), "n"],
    ["state", (r) => make("span", { class: { closed: "up", failed: "no" }[r.state] || "" }, r.state)],
    ["asked", (r) => String(r.cohort), "n"], ["counted", (r) => (r.counted === null ? `(${r.stored})` : String(r.counted)), "n"],
    ...(rounds.some((r) => r.clients > (r.counted ?? r.stored)) ? [["devices behind them", (r) => String(r.clients), "n"]] : []),
    ["rejected", (r) => String(r.rejected), "n"], ["took", took, "n"], ["bytes up", (r) => bytes(r.bytes_up), "n"],
    ["of dense", (r) => (r.bytes_dense ? percent(r.bytes_up / r.bytes_dense) : "–"), "n"],
    ["bytes down", (r) => (r.bytes_down === null ? "–" : bytes(r.bytes_down)), "n"],
    ["of dense", (r) => (r.bytes_down_dense ? percent(r.bytes_down / r.bytes_down_dense) : "–"), "n"],
    ["accuracy low – median – high", (r) => (r.accuracy
      ? [r.accuracy.low, r.accuracy.median, r.accuracy.high].map((v) => (100 * v).toFixed(1)).join(" – ") : "–"), "n"],
    ["overlap", (r) => percent(r.overlap), "n"],
    ...(rounds.some((r) => Object.keys(r.means).length) ? [["means within the sum", (r) => Object.entries(r.means)
      .map(([name, value]) => `${name} ${value.toPrecision(4)}`).join(", ")]] : []), ["why it failed", (r) => r.failure || "", "text"],
  ], rounds, "No round was opened yet: the coordinator waits for its devices."));
  $("workers-card").hidden = !about.workers.length;
  put("workers", table([
    ["worker", (w) => String(w.number), "n"], ["pid", (w) => (w.pid === null ? "–" : String(w.pid)), "n"],
    ["link", (w) => make("span", { class: w.connected ? "up" : w.pid === null ? "no" : "down" },
      w.pid === null ? "gone" : w.connected ? "connected" : "away")],
    ["since", (w) => ago(w.since)], ["devices", (w) => String(w.devices), "n"], ["updates", (w) => String(w.updates), "n"],
    ["last heard", (w) => ago(w.heard)], ["last word", (w) => w.word, "text"],
  ], about.workers, "The coordinator takes all updates itself."));
  put("devices", table([
    ["device", (d) => d.device],
    ["link", (d) => make("span", { class: d.quarantine ? "no" : d.online && !d.retired ? "up" : "down" },
      d.quarantine ? "shut out" : d.left_by === "owner" ? "left by its owner" : d.retired ? "left" : d.online ? "online" : "away")],
    ["boot", (d) => String(d.boot), "n"], ["last birth or death", (d) => ago(d.seen)],
    ...(moved.length ? [["labels moved", (d) => share(d.drift && d.drift.labels), "n"],
      ["features moved", (d) => spreads(d.drift && d.drift.features), "n"]] : []),
    ["", (d) => leaveButton(d)],
  ], devices, "No device has come yet."));
  put("events", table([
    ["at", (e) => clock(e.at)], ["event", (e) => e.kind], ["attempt", (e) => (e.attempt === null ? "" : String(e.attempt)), "n"],
    ["device", (e) => e.device || ""],
    ["", (e) => String(e.detail.reason || "").slice(0, 160), "text"],
  ], events, "Nothing happened yet."));
  $("main").hidden = false;
  $("fresh").textContent = `as of ${clock(Date.now() / 1000)}; asks again every ${EVERY_MS / 1000} s`;
  document.title = `${about.name} ${about.round}/${about.rounds} · Talaria`;
}

function releaseButton(device) {
  const button = make("button", { type: "button", "data-device": device }, "Release");
  button.addEventListener("click", () => {
    if (window.confirm(`Let ${device} in again?`)) order(`devices/${device}/release`);
  });
  return button;
}

function leaveButton({ device, retired }) {
  const button = make("button", { type: "button", "data-device": device }, retired ? "Readmit" : "Retire");
  button.addEventListener("click", () => {
    if (window.confirm(retired ? `Take ${device} in again?` : `Let ${device} leave for good?`)) {
      order(`devices/${device}/${retired ? "readmit" : "retire"}`);
    }
  });
  return button;
}

function trouble(text) {
  $("trouble").hidden = !text;
  $("trouble").textContent = text;
}

async function order(path) {
  refused = "";
  try {
    await ask(`/api/v1/fleets/${drawn}/${path}`, { method: "POST" });
  } catch (error) {
    refused = error.message;
  }
  await refresh();
}

async function refresh() {
  clearTimeout(timer);
  const mine = (asked += 1);
  try {
    const fleets = await ask("/api/v1/fleets");
    if (mine !== asked) return;
    const names = fleets.map((f) => f.name);
    if (!names.includes(fleet)) fleet = names[0] || "";
    if ([...$("fleet").options].map((o) => o.value).join() !== names.join()) {
      put("fleet", ...names.map((name) => make("option", { value: name }, name)));
    }
    $("fleet").value = fleet;
    if (fleet) {
      const at = `/api/v1/fleets/${fleet}`;
      const [rounds, devices, shut, events] = await Promise.all([
        ask(`${at}/attempts?limit=60`), ask(`${at}/devices?limit=${MOST}`), ask(`${at}/quarantine?limit=${MOST}`), ask(`${at}/events?limit=40`),
      ]);
      const closed = rounds.find((r) => r.state === "closed");
      const overlap = closed ? await ask(`${at}/attempts/${closed.attempt}/overlap?limit=16`) : null;
      if (mine !== asked) return;
      show(fleets.find((f) => f.name === fleet), rounds, devices, shut, events, overlap);
    }
    $("door").hidden = true;
    trouble(refused);
  } catch (error) {
    if (mine !== asked) return;
    if (error instanceof NeedsToken) {
      $("door").hidden = false;
      $("main").hidden = true;
      if (token) { keep(""); trouble("That token is not the right one."); }
      return;
    }
    trouble(`The coordinator does not answer (${error.message}); what stands below is old.`);
  }
  timer = setTimeout(refresh, EVERY_MS);
}

$("fleet").addEventListener("change", () => { fleet = $("fleet").value; refused = ""; refresh(); });
$("pause").addEventListener("click", () => order("pause"));
$("resume").addEventListener("click", () => order("resume"));
$("extend").addEventListener("click", () => {
  const rounds = Number(window.prompt("How many rounds more?", "10"));
  if (Number.isInteger(rounds) && rounds > 0) order(`extend?rounds=${rounds}`);
});
$("next").addEventListener("click", () => {
  const rounds = Number(window.prompt("Another run from the last model: how many rounds?", "10"));
  if (!Number.isInteger(rounds) || rounds < 1) return;
  const classes = Number(window.prompt("How many classes has its head? 0: as many as now", "0"));
  if (Number.isInteger(classes) && classes >= 0) order(`next?rounds=${rounds}&classes=${classes}`);
});
$("abort").addEventListener("click", () => {
  if (window.confirm("Call the open round off and open no further one?")) order("abort");
});
$("door").addEventListener("submit", (event) => {
  event.preventDefault();
  keep($("token").value.trim());
  $("token").value = "";
  refresh();
});
$("theme").addEventListener("click", () => {
  const dark = document.documentElement.dataset.theme
    ? document.documentElement.dataset.theme === "dark" : window.matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "light" : "dark";
});
refresh();
