// @ts-check
/** Epochs of a data cursor, with skips of the policy `shift` (pages 63, 64). @module */
import { blake3Wide } from "./blake3.js";

/**
 * A skip of the policy `shift`: from the position `first` on, samples of the ranges are removed, or
 * `draws` draws are left out.
 *
 * @typedef {{first: bigint, ranges: [bigint, bigint][], draws: bigint}} Shift
 */
/** @typedef {{n: bigint, batch: bigint, tail: string, seed: bigint}} Order */

const MASK = 2n ** 64n - 1n;
/** The most samples that are looked up in orders: each takes 20 microseconds. */
const MOST_LOOKUPS = 2n ** 21n;
const ROUNDS = [0, 1, 2, 3, 4, 5, 6, 7];

/** @param {bigint} x the finaliser of SplitMix64 */
function mix(x) {
  x = ((x ^ (x >> 30n)) * 0xbf58476d1ce4e5b9n) & MASK;
  x = ((x ^ (x >> 27n)) * 0x94d049bb133111ebn) & MASK;
  return x ^ (x >> 31n);
}

/** @param {bigint} n @returns {bigint} the smallest integer whose square is at least n */
function rootOf(n) {
  let root = BigInt(Math.floor(Math.sqrt(Number(n))));
  while (root > 0n && (root - 1n) * (root - 1n) >= n) root -= 1n;
  while (root * root < n) root += 1n;
  return root;
}

/**
 * Return the order `feistel-v1` of an epoch.
 *
 * @param {bigint} n @param {bigint} seed @param {bigint} epoch
 * @returns {{sampleAt: (position: bigint) => bigint, positionOf: (sample: bigint) => bigint}}
 */
export function orderOf(n, seed, epoch) {
  const a = rootOf(n);
  const b = (n + a - 1n) / a;
  const input = new Uint8Array(34);
  input.set(new TextEncoder().encode("ckptfmt/feistel-v1"));
  const numbers = new DataView(input.buffer);
  numbers.setBigUint64(18, seed, true);
  numbers.setBigUint64(26, epoch, true);
  const output = new DataView(blake3Wide(input).buffer);
  const keys = ROUNDS.map((round) => output.getBigUint64(8 * round, true));
  const f = (/** @type {number} */ round, /** @type {bigint} */ x, /** @type {bigint} */ m) =>
    ((mix((x + keys[round]) & MASK) >> 24n) * m) >> 40n;
  /** @param {bigint} place @param {number[]} rounds @param {1n | -1n} sign */
  const walk = (place, rounds, sign) => {
    do {
      let left = place / b;
      let right = place % b;
      for (const round of rounds) {
        if (round % 2 === 0) left = (left + a + sign * f(round, right, a)) % a;
        else right = (right + b + sign * f(round, left, b)) % b;
      }
      place = left * b + right;
    } while (place >= n);
    return place;
  };
  const backwards = ROUNDS.toReversed();
  return {
    sampleAt: (position) => walk(position, ROUNDS, 1n),
    positionOf: (sample) => walk(sample, backwards, -1n),
  };
}

/** Walks through the epochs of one source. */
class Walk {
  epoch = 0n;
  /** Positions of the epoch so far. */
  within = 0n;
  /** @type {Set<bigint>} */
  #removed = new Set();
  /** @type {bigint} positions of the epoch */
  #length;
  /** Where the epoch was, in its order of n samples and in positions, as samples were removed. */
  #mark = { place: 0n, within: 0n };
  /** @type {bigint[]} places of the removed samples in the order of the epoch */
  #places = [];
  #hasPlaces = false;

  /** @param {Order} order */
  constructor(order) {
    this.order = order;
    this.#length = this.#lengthOf(order.n);
  }

  /** @param {bigint} count of samples @returns {bigint} positions of an epoch */
  #lengthOf(count) {
    const { tail, batch } = this.order;
    if (tail === "carry") return count;
    return (tail === "drop" ? count / batch : (count + batch - 1n) / batch) * batch;
  }

  #begin() {
    this.within = 0n;
    this.#mark = { place: 0n, within: 0n };
    this.#hasPlaces = false;
    this.#length = this.#lengthOf(this.order.n - BigInt(this.#removed.size));
  }

  /** @param {bigint} count of positions or draws */
  advance(count) {
    this.within += count;
    if (this.within < this.#length) return;
    const rest = this.within - this.#length;
    this.epoch += 1n;
    this.#begin();
    this.epoch += rest / this.#length;
    this.within = rest % this.#length;
  }

  /** @param {[bigint, bigint][]} ranges of samples */
  remove(ranges) {
    /** @type {bigint[]} */
    const fresh = [];
    for (const [begin, end] of ranges) {
      for (let sample = begin; sample < end; sample += 1n) {
        if (!this.#removed.has(sample)) fresh.push(sample);
      }
    }
    if (fresh.length === 0) return;
    const { n, seed } = this.order;
    if (this.within === 0n) {
      for (const sample of fresh) this.#removed.add(sample);
      this.#begin();
      return;
    }
    const order = orderOf(n, seed, this.epoch);
    if (!this.#hasPlaces) this.#places = [...this.#removed].map(order.positionOf);
    this.#hasPlaces = true;
    const ascending = (/** @type {bigint} */ x, /** @type {bigint} */ y) => (x < y ? -1 : 1);
    let place = this.#mark.place + this.within - this.#mark.within;
    for (const own of this.#places.sort(ascending)) {
      if (own >= this.#mark.place && own <= place) place += 1n;
    }
    if (place > n) place = n; // the rest of the epoch fills a batch
    for (const sample of fresh) {
      this.#removed.add(sample);
      this.#places.push(order.positionOf(sample));
    }
    this.#mark = { place, within: this.within };
    const gone = this.#places.filter((own) => own >= place).length;
    this.#length = this.#lengthOf(this.within + n - place - BigInt(gone));
    this.advance(0n);
  }
}

/**
 * Return the epoch, and the position in the epoch, of a position of a source without a mixture.
 *
 * @param {bigint} position @param {Order} order @param {Shift[]} shifts in the order of the cursor
 * @returns {{epoch: bigint, within: bigint} | null} null if an answer would take too long
 */
export function placeOf(position, order, shifts) {
  const walk = new Walk(order);
  let at = 0n;
  const sorted = shifts
    .filter(({ first }) => first <= position)
    .sort((one, other) => (one.first < other.first ? -1 : one.first > other.first ? 1 : 0));
  let removed = 0n;
  let lookups = 0n;
  for (const { ranges } of sorted) {
    for (const [begin, end] of ranges) removed += end - begin;
    if (ranges.length > 0) lookups += removed;
  }
  if (lookups > MOST_LOOKUPS) return null;
  for (const { first, ranges, draws } of sorted) {
    walk.advance(first - at);
    at = first;
    walk.remove(ranges);
    walk.advance(draws);
  }
  walk.advance(position - at);
  return { epoch: walk.epoch, within: walk.within };
}
