// Whatever is random, as docs/PROTOCOL.md derives it: equal draws in every language. Runs in Node and in a page.

const FULL = (1n << 64n) - 1n;

/** The seed of (seed, client, round, purpose), 63 bits. */
export async function seedOf(seed, client, round, purpose) {
  const text = new TextEncoder().encode(`${seed}\x1f${client}\x1f${round}\x1f${purpose}`);
  const digest = await crypto.subtle.digest("SHA-256", text);
  return new DataView(digest).getBigUint64(0) >> 1n;
}

/** Four words of Philox 4x64-10 (Salmon et al. 2011). */
function block(key, counter) {
  let [a, b, c, d] = [counter, 0n, 0n, 0n];
  let [k0, k1] = [key & FULL, key >> 64n];
  for (let round = 0; round < 10; round++) {
    const left = 0xd2e7470ee14c6c93n * a;
    const right = 0xca5a826395121157n * c;
    [a, b, c, d] = [(right >> 64n) ^ b ^ k0, right & FULL, (left >> 64n) ^ d ^ k1, left & FULL];
    k0 = (k0 + 0x9e3779b97f4a7c15n) & FULL;
    k1 = (k1 + 0xbb67ae8584caa73bn) & FULL;
  }
  return [a, b, c, d];
}

/** Random numbers, one after another. */
export class Draws {
  #key;
  #counter = 0n;
  #rest = [];

  constructor(seed) {
    this.#key = BigInt(seed);
  }

  static async of(seed, client, round, purpose) {
    return new Draws(await seedOf(seed, client, round, purpose));
  }

  #word() {
    if (!this.#rest.length) this.#rest = block(this.#key, ++this.#counter);
    return this.#rest.shift();
  }

  words(count) {
    return Array.from({ length: count }, () => this.#word());
  }

  /** Numbers in [0, 1). */
  uniform(count) {
    return Float64Array.from({ length: count }, () => Number(this.#word() >> 11n) * 2 ** -53);
  }

  /** Whole numbers in low..high-1. */
  integers(low, high, count) {
    return Array.from(this.uniform(count), (share) => low + Math.floor(share * (high - low)));
  }

  /** A random order of 0..count-1. */
  order(count) {
    const words = this.words(count);
    return [...words.keys()].sort((i, j) => (words[i] < words[j] ? -1 : words[i] > words[j] ? 1 : i - j));
  }

  /** Standard normal numbers (Box and Muller). */
  normal(count) {
    const half = Math.ceil(count / 2);
    const length = this.uniform(half).map((u) => Math.sqrt(-2 * Math.log1p(-u)));
    const turn = this.uniform(half).map((v) => 2 * Math.PI * v);
    const cosines = length.map((r, i) => r * Math.cos(turn[i]));
    const sines = length.map((r, i) => r * Math.sin(turn[i]));
    return Float64Array.of(...cosines, ...sines).slice(0, count);
  }
}

/** An order in pieces of `size`; a single one left over joins the piece before it. */
export function cut(order, size) {
  const pieces = [];
  for (let at = 0; at < order.length; at += size) pieces.push(order.slice(at, at + size));
  if (size > 1 && pieces.length > 1 && pieces.at(-1).length === 1) pieces.splice(-2, 2, pieces.slice(-2).flat());
  return pieces;
}

/** Optimizer steps that a recipe takes on `count` samples. */
export function stepsOf(recipe, count) {
  if (!count) return 0;
  const wanted = recipe.steps ?? recipe.epochs * cut([...Array(count).keys()], recipe.batch).length;
  return recipe.most_steps == null ? wanted : Math.min(wanted, recipe.most_steps);
}

/** `steps` batches of indices, a new order each epoch. */
export function* batches(count, size, steps, draws) {
  for (let done = 0; done < steps && count; ) {
    for (const piece of cut(draws.order(count), size)) {
      yield piece;
      if (++done === steps) return;
    }
  }
}

/** Dropout's factors: 1/(1-share) where a value stays, 0 where it falls away. */
export function kept(draws, share, count) {
  const stays = 1 - share;
  const factor = Math.fround(stays === 0 ? 0 : 1 / stays);
  return Float32Array.from(draws.uniform(count), (one) => (one < stays ? factor : 0));
}
