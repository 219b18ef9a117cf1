// @ts-check
/** The decoders of page 55: planes, xor, difference, sparse, classes. @module */
import { dtypeOf } from "./dtypes.js";
import { refuse } from "./errors.js";
import { decodeFrame } from "./zstd.js";

/** @param {string} clause @param {string} detail @returns {never} */
export const malformed = (clause, detail) => refuse("ENCODED_FORM", clause, detail);

/**
 * Words of 1, 2, 4 or 8 bytes.
 *
 * @typedef {Uint8Array | Uint16Array | Uint32Array | BigUint64Array} Words
 */

/** @param {number} width @param {number} count @returns {Words} */
const makeWords = (width, count) =>
  width === 1
    ? new Uint8Array(count)
    : width === 2
      ? new Uint16Array(count)
      : width === 4
        ? new Uint32Array(count)
        : new BigUint64Array(count);

/**
 * View bytes as words; a copy is made where the bytes aren't aligned.
 *
 * @param {Uint8Array} bytes @param {number} width @returns {Words}
 */
export function wordsOf(bytes, width) {
  const own = bytes.byteOffset % width === 0 ? bytes : bytes.slice();
  const kind = { 1: Uint8Array, 2: Uint16Array, 4: Uint32Array, 8: BigUint64Array }[width];
  return new /** @type {any} */ (kind)(own.buffer, own.byteOffset, own.length / width);
}

/** @param {Words} words @returns {Uint8Array} */
const bytesOf = (words) => new Uint8Array(words.buffer, words.byteOffset, words.byteLength);

/** Stored bytes, read from the begin to the end. */
export class Stored {
  /** @param {Uint8Array} bytes */
  constructor(bytes) {
    this.bytes = bytes;
    this.at = 0;
  }

  /** Read `count` bytes as they are. @param {number} count */
  take(count) {
    if (this.at + count > this.bytes.length) malformed("REQ-ENC-006", "the stored bytes end early");
    this.at += count;
    return this.bytes.subarray(this.at - count, this.at);
  }

  byte() {
    return this.take(1)[0];
  }

  /** Read a number. @param {number} most */
  number(most) {
    let value = 0;
    for (let scale = 1; ; scale *= 128) {
      const byte = this.byte();
      value += (byte & 127) * scale;
      if (value > most) malformed("REQ-ENC-007", "a number is above its maximum");
      if (byte < 128) {
        if (byte === 0 && scale > 1) malformed("REQ-ENC-007", "a number ends with a zero byte");
        return value;
      }
      if (scale > 2 ** 49) malformed("REQ-ENC-007", "a number is above its maximum");
    }
  }

  /**
   * Read a string of `nbytes` bytes, or with `isPlane` also a plane of the form 3.
   *
   * @param {number} nbytes @param {boolean} [isPlane]
   * @returns {Uint8Array}
   */
  string(nbytes, isPlane = false) {
    if (nbytes === 0) return new Uint8Array(0);
    const kind = this.byte();
    if (kind === 0) return this.take(nbytes);
    if (kind === 1) return new Uint8Array(nbytes).fill(this.byte());
    if (kind === 2) return decodeFrame(this.take(this.number(nbytes)), nbytes);
    if (kind !== 3 || !isPlane) malformed("REQ-ENC-008", `a string is of the unknown kind ${kind}`);
    const places = this.set(nbytes);
    const listed = this.string(places.length);
    const plane = new Uint8Array(nbytes);
    for (let k = 0; k < places.length; k += 1) plane[places[k]] = listed[k];
    return plane;
  }

  /** Read bits that are packed in a plane. @param {number} count */
  bits(count) {
    return checkBits(this.string((count + 7) >> 3, true), count);
  }

  /**
   * Read a set of places.
   *
   * @param {number} count of places
   * @returns {Uint32Array} the members, ascending
   */
  set(count) {
    const head = this.number(count);
    const isComplement = head % 2 === 1;
    const listedCount = (head - (head % 2)) / 2;
    const listed = new Uint32Array(listedCount);
    if (listedCount > 0) {
      const low = this.byte();
      if (low >= 32 || 2 ** low > count) malformed("REQ-ENC-011", "a set has too many low bits");
      const zeros = this.number(Math.floor(count / 2 ** low));
      const bitCount = listedCount + zeros;
      const string = checkBits(this.string((bitCount + 7) >> 3), bitCount);
      const lows = this.lowBits(listedCount, low);
      let place = -1;
      let at = 0;
      let run = 0;
      for (let bit = 0; bit < bitCount; bit += 1) {
        if (((string[bit >> 3] >> (bit & 7)) & 1) === 0) {
          run += 1;
          continue;
        }
        if (at === listedCount) malformed("REQ-ENC-011", "a set has too many members");
        place += 1 + run * 2 ** low + Number(lows[at]);
        if (place >= count) malformed("REQ-ENC-011", "a set has a place beyond its end");
        listed[at] = place;
        at += 1;
        run = 0;
      }
      if (at !== listedCount || run > 0) malformed("REQ-ENC-011", "a set has too few members");
    }
    if (!isComplement) return listed;
    const members = new Uint32Array(count - listedCount);
    let next = 0;
    let at = 0;
    for (let place = 0; place < count; place += 1) {
      if (at < listedCount && listed[at] === place) at += 1;
      else members[next++] = place;
    }
    return members;
  }

  /**
   * Read the low bits of words.
   *
   * @param {number} count of words @param {number} bits of each
   * @returns {Float64Array | BigUint64Array} BigInt for more than 52 bits
   */
  lowBits(count, bits) {
    const isBig = bits > 52;
    const words = isBig ? new BigUint64Array(count) : new Float64Array(count);
    const add = (
      /** @type {number} */ at,
      /** @type {number} */ value,
      /** @type {number} */ shift,
    ) => {
      if (isBig) {
        /** @type {BigUint64Array} */ (words)[at] |= BigInt(value) << BigInt(shift);
      } else /** @type {Float64Array} */ (words)[at] += value * 2 ** shift;
    };
    for (let byte = 0; byte + 8 <= bits; byte += 8) {
      const column = this.take(count);
      for (let at = 0; at < count; at += 1) add(at, column[at], byte);
    }
    const rest = bits % 8;
    const packed = checkBits(this.take(Math.ceil((rest * count) / 8)), rest * count);
    for (let bit = 0; bit < rest; bit += 1) {
      for (let at = 0; at < count; at += 1) {
        const place = bit * count + at;
        if ((packed[place >> 3] >> (place & 7)) & 1) add(at, 1, bits - rest + bit);
      }
    }
    return words;
  }

  /**
   * Read planes of words.
   *
   * @param {number} count of words @param {number} width of a word in bytes
   * @param {number} [planes] how many are stored; the other bytes are zero
   * @returns {Words}
   */
  planes(count, width, planes = width) {
    const words = makeWords(width, count);
    const bytes = bytesOf(words);
    for (let plane = 0; plane < planes; plane += 1) {
      const column = this.string(count, true);
      for (let at = 0, to = plane; at < count; at += 1, to += width) bytes[to] = column[at];
    }
    return words;
  }

  /**
   * Read changes: steps of lanes, most of which are 0.
   *
   * @param {number} count of lanes @param {number} width of a lane in bytes
   * @returns {Words}
   */
  changes(count, width) {
    const steps = makeWords(width, count);
    const places = this.set(count);
    if (places.length === 0) return steps;
    const signs = this.bits(places.length);
    const levels = this.byte();
    if (levels > 15) malformed("REQ-ENC-018", "there are too many levels");
    const heights = new Float64Array(places.length);
    let reached = Uint32Array.from(places.keys());
    for (let level = 1; level <= levels; level += 1) {
      if (reached.length === 0) malformed("REQ-ENC-018", "a level is above one without members");
      const next = this.set(reached.length);
      reached = Uint32Array.from(next, (at) => reached[at]);
      for (const at of reached) heights[at] = level;
    }
    /** @type {Words | null} */
    const more = reached.length > 0 ? this.planes(reached.length, width) : null;
    /** @type {Map<number, bigint>} heights of lanes of eight bytes */
    const big = new Map();
    if (more !== null) {
      reached.forEach((at, k) => {
        if (width === 8) big.set(at, BigInt(levels) + BigInt(more[k]));
        else heights[at] = levels + Number(more[k]);
      });
    }
    const most = 2 ** (8 * width) - 1;
    for (let at = 0; at < places.length; at += 1) {
      const isUp = (signs[at >> 3] >> (at & 7)) & 1;
      if (width === 8) {
        const height = big.get(at) ?? BigInt(heights[at]);
        const step = 2n * height + 1n + BigInt(isUp);
        if (step > 0xffffffffffffffffn) malformed("REQ-ENC-018", "a height is too large");
        steps[places[at]] = step;
      } else {
        const step = 2 * heights[at] + 1 + isUp;
        if (step > most) malformed("REQ-ENC-018", "a height is too large");
        steps[places[at]] = step;
      }
    }
    return steps;
  }

  /** Refuse bytes that are left. */
  end() {
    if (this.at !== this.bytes.length) {
      malformed("REQ-ENC-006", "something follows the end of the form");
    }
  }
}

/** @param {Uint8Array} packed @param {number} count of bits */
function checkBits(packed, count) {
  const rest = count & 7;
  if (rest && packed[packed.length - 1] >> rest) {
    malformed("REQ-ENC-010", "unused bits of the last byte aren't zero");
  }
  return packed;
}

/**
 * Go from base lanes to content lanes by steps.
 *
 * @param {Words} base @param {Words} steps which become the content
 * @param {boolean} isSigned whether lanes are sign and magnitude
 */
function applySteps(base, steps, isSigned) {
  if (base instanceof BigUint64Array || steps instanceof BigUint64Array) {
    const [from, to] = [
      /** @type {BigUint64Array} */ (base),
      /** @type {BigUint64Array} */ (steps),
    ];
    const top = 1n << 63n;
    const order = (/** @type {bigint} */ lane) =>
      isSigned && lane & top ? lane ^ (top - 1n) : lane;
    for (let at = 0; at < to.length; at += 1) {
      const step = to[at];
      if (step === 0n) to[at] = from[at];
      else {
        const distance = step & 1n ? -((step + 1n) >> 1n) : step >> 1n;
        to[at] = order(BigInt.asUintN(64, order(from[at]) + distance));
      }
    }
    return;
  }
  const top = 2 ** (8 * base.BYTES_PER_ELEMENT - 1);
  const flip = top - 1;
  for (let at = 0; at < steps.length; at += 1) {
    const step = steps[at];
    let lane = base[at];
    if (step !== 0) {
      if (isSigned && lane >= top) lane ^= flip;
      // The step's lowest bit is its direction; the sum wraps as it is stored.
      lane = step & 1 ? lane - (step + 1) / 2 : lane + step / 2;
      steps[at] = lane;
      lane = steps[at];
      if (isSigned && lane >= top) lane ^= flip;
    }
    steps[at] = lane;
  }
}

/** @param {Words} base @returns {Uint8Array} the key of each lane */
function keysOf(base) {
  const keys = new Uint8Array(base.length);
  const width = base.BYTES_PER_ELEMENT;
  for (let at = 0; at < base.length; at += 1) {
    const lane = base[at];
    keys[at] =
      typeof lane === "bigint"
        ? Number((lane >> 55n) & 255n)
        : width === 1
          ? lane << 1
          : width === 2
            ? lane >> 7
            : lane >>> 23;
  }
  return keys;
}

/** @param {Stored} stored @param {Words} base @returns {Words} the steps */
function decodeClasses(stored, base) {
  const width = base.BYTES_PER_ELEMENT;
  const bits = 8 * width;
  const cutCount = stored.byte();
  if (cutCount > 31) malformed("REQ-ENC-020", "there are too many cuts");
  const cuts = stored.take(cutCount);
  if (cuts.some((cut, at) => cut <= (at === 0 ? 0 : cuts[at - 1]))) {
    malformed("REQ-ENC-020", "the cuts don't increase, or begin with 0");
  }
  const keys = keysOf(base);
  const counts = new Uint32Array(257);
  for (const key of keys) counts[key + 1] += 1;
  for (let key = 0; key < 256; key += 1) counts[key + 1] += counts[key];
  const ends = [...cuts.map((cut) => counts[cut]), base.length];
  const places = new Uint32Array(base.length);
  const next = counts.slice();
  for (let at = 0; at < keys.length; at += 1) places[next[keys[at]]++] = at;
  const steps = makeWords(width, base.length);
  let begin = 0;
  for (let own = 0; own <= cutCount; own += 1) {
    const end = own < cutCount ? counts[cuts[own]] : ends[ends.length - 1];
    const count = end - begin;
    if (count > 0) {
      const part = decodeClass(stored, count, width, bits);
      for (let k = 0; k < count; k += 1) steps[places[begin + k]] = part[k];
    }
    begin = end;
  }
  return steps;
}

/** @param {Stored} stored @param {number} count @param {number} width @param {number} bits
 *  @returns {Words} */
function decodeClass(stored, count, width, bits) {
  const low = stored.byte();
  if (low === 255) return stored.changes(count, width);
  if (low >= bits) malformed("REQ-ENC-023", "a class has too many low bits");
  if (low === 0) return stored.planes(count, width);
  const signs = stored.bits(count);
  const middles = stored.lowBits(count, low - 1);
  const steps = stored.planes(count, width, Math.ceil((bits - low) / 8));
  const sign = (/** @type {number} */ at) => (signs[at >> 3] >> (at & 7)) & 1;
  if (steps instanceof BigUint64Array) {
    for (let at = 0; at < count; at += 1) {
      if (steps[at] >> BigInt(bits - low)) malformed("REQ-ENC-023", "planes hold too many bits");
      steps[at] = (steps[at] << BigInt(low)) | (BigInt(middles[at]) << 1n) | BigInt(sign(at));
    }
    return steps;
  }
  const most = 2 ** (bits - low);
  for (let at = 0; at < count; at += 1) {
    if (steps[at] >= most) malformed("REQ-ENC-023", "planes hold too many bits");
    steps[at] = steps[at] * 2 ** low + Number(middles[at]) * 2 + sign(at);
  }
  return steps;
}

/**
 * Decode a block.
 *
 * @param {string} encoding one of `planes`, `xor`, `difference`, `sparse`, `classes`
 * @param {Uint8Array} bytes the stored bytes
 * @param {number} nbytes bytes of the content
 * @param {string} dtype
 * @param {Uint8Array | null} base as many bytes as the content; null for `planes`
 * @returns {Uint8Array} the content
 * @throws {import("./errors.js").CkptError} `ENCODED_FORM`
 */
export function decodeBlock(encoding, bytes, nbytes, dtype, base) {
  const { lane: width, isSigned } = dtypeOf(dtype);
  const count = nbytes / width;
  const stored = new Stored(bytes);
  /** @type {Words} */
  let words;
  if (encoding === "planes") words = stored.planes(count, width);
  else if (encoding === "xor") {
    words = stored.planes(count, width);
    const out = bytesOf(words);
    const from = /** @type {Uint8Array} */ (base);
    for (let at = 0; at < nbytes; at += 1) out[at] ^= from[at];
  } else {
    const from = wordsOf(/** @type {Uint8Array} */ (base), width);
    words =
      encoding === "difference"
        ? stored.planes(count, width)
        : encoding === "sparse"
          ? stored.changes(count, width)
          : decodeClasses(stored, from);
    applySteps(from, words, isSigned);
  }
  stored.end();
  return bytesOf(words);
}
