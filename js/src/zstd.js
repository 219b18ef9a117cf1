// @ts-check
/**
 * A strict decoder of one zstd frame (RFC 8878), as page 55 of the specification allows it.
 *
 * The common decoder in JavaScript skips checksums and accepts some damaged frames; a reader of
 * checkpoints must refuse both.
 *
 * @module
 */
import { refuse } from "./errors.js";

/** @param {string} detail @param {string} [clause] @returns {never} */
const malformed = (detail, clause = "REQ-ENC-009") => refuse("ENCODED_FORM", clause, detail);
/** @returns {never} */
const damaged = () => malformed("a frame is damaged");

/** Most bytes that a block holds. */
const BLOCK_NBYTES = 131072;

/**
 * Decode a frame that states its content's size.
 *
 * @param {Uint8Array} frame exactly one frame
 * @param {number} nbytes bytes of its content
 * @returns {Uint8Array}
 */
export function decodeFrame(frame, nbytes) {
  const { at: begin, blockNbytes } = readHead(frame, nbytes);
  const content = new Uint8Array(nbytes);
  const state = new FrameState(content);
  let at = begin;
  for (let isLast = false; !isLast; ) {
    if (at + 3 > frame.length) damaged();
    const header = frame[at] | (frame[at + 1] << 8) | (frame[at + 2] << 16);
    isLast = (header & 1) === 1;
    const kind = (header >> 1) & 3;
    const count = header >> 3;
    at += 3;
    const end = at + (kind === 1 ? 1 : count);
    if (kind === 3 || count > blockNbytes || end > frame.length) damaged();
    if (kind === 2) state.decodeBlock(frame.subarray(at, end), blockNbytes);
    else {
      if (state.out + count > nbytes) damaged();
      if (kind === 0) content.set(frame.subarray(at, end), state.out);
      else content.fill(frame[at], state.out, state.out + count);
      state.out += count;
    }
    at = end;
  }
  if (state.out !== nbytes) malformed(`a frame holds ${state.out} bytes instead of ${nbytes}`);
  const hasChecksum = (frame[4] & 4) !== 0;
  if (at + (hasChecksum ? 4 : 0) !== frame.length) {
    malformed("a frame ends early, or something follows it");
  }
  if (hasChecksum) {
    const stated = new DataView(frame.buffer, frame.byteOffset + at, 4).getUint32(0, true);
    if (Number(xxh64(content) & 0xffffffffn) !== stated) {
      malformed("the checksum of a frame is wrong", "REQ-ENC-024");
    }
  }
  return content;
}

/**
 * Read the header of a frame.
 *
 * @param {Uint8Array} frame @param {number} nbytes
 * @returns {{at: number, blockNbytes: number}} where blocks begin, and the most that one holds
 */
function readHead(frame, nbytes) {
  const integer = (/** @type {number} */ place, /** @type {number} */ width) => {
    if (place + width > frame.length) damaged();
    let value = 0;
    for (let k = width - 1; k >= 0; k -= 1) value = value * 256 + frame[place + k];
    return value;
  };
  if (integer(0, 4) !== 0xfd2fb528) malformed("a frame has no magic number");
  const descriptor = integer(4, 1);
  const isSingle = (descriptor & 32) !== 0;
  if (descriptor & 8) malformed("a frame uses a reserved bit");
  let at = 5;
  let window = 0;
  if (!isSingle) {
    const byte = integer(at, 1);
    window = 2 ** (10 + (byte >> 3)) * (1 + (byte & 7) / 8);
    at += 1;
  }
  const idWidth = [0, 1, 2, 4][descriptor & 3];
  if (integer(at, idWidth) !== 0) malformed("a frame names a dictionary");
  at += idWidth;
  const sizeWidth = [isSingle ? 1 : 0, 2, 4, 8][descriptor >> 6];
  if (sizeWidth === 0) malformed("a frame doesn't state the size of its content");
  const size = integer(at, sizeWidth) + (sizeWidth === 2 ? 256 : 0);
  at += sizeWidth;
  if (size !== nbytes) malformed(`a frame isn't one of ${nbytes} bytes without a dictionary`);
  if (window > Math.max(nbytes, 1024)) malformed("a frame needs a larger window than its content");
  return { at, blockNbytes: Math.min(isSingle ? size : window, BLOCK_NBYTES) };
}

/* --------------------------------------------------------------------- bits and tables ---- */

/** Bits that are read from the end of bytes to their begin. */
class BackwardBits {
  /** @param {Uint8Array} bytes whose last byte ends with a mark: its highest bit that is set */
  constructor(bytes) {
    const last = bytes[bytes.length - 1];
    if (!last) damaged();
    /** The bytes between zeros, so that every read of four bytes is within the array. */
    this.bytes = new Uint8Array(bytes.length + 8);
    this.bytes.set(bytes, 4);
    /** Number of bits that are left; below 0 after reading too many, which are zeros. */
    this.left = 8 * bytes.length - 8 + (31 - Math.clz32(last));
  }

  /** Read bits. @param {number} count up to 31 @returns {number} */
  read(count) {
    if (count > 16) return this.read(count - 16) * 65536 + this.read(16);
    this.left -= count;
    const at = this.left + 32;
    if (at < 0) damaged();
    const { bytes } = this;
    const byte = at >> 3;
    return (
      ((bytes[byte] | (bytes[byte + 1] << 8) | (bytes[byte + 2] << 16)) >>> (at & 7)) &
      ((1 << count) - 1)
    );
  }
}

/**
 * A table of an FSE code: for each state its symbol, and how the next state follows.
 *
 * @typedef {{log: number, symbol: Uint8Array, bits: Uint8Array, next: Uint16Array}} Fse
 */

/**
 * @param {number[]} counts of each symbol, -1 for less than one
 * @param {number} log
 * @returns {Fse}
 */
function makeFse(counts, log) {
  const size = 1 << log;
  const symbol = new Uint8Array(size);
  const seen = new Uint16Array(counts.length);
  let high = size;
  counts.forEach((count, own) => {
    if (count === -1) symbol[(high -= 1)] = own;
    seen[own] = count === -1 ? 1 : count;
  });
  const step = (size >> 1) + (size >> 3) + 3;
  let place = 0;
  counts.forEach((count, own) => {
    for (let k = 0; k < count; k += 1) {
      symbol[place] = own;
      do place = (place + step) & (size - 1);
      while (place >= high);
    }
  });
  const bits = new Uint8Array(size);
  const next = new Uint16Array(size);
  for (let state = 0; state < size; state += 1) {
    const value = seen[symbol[state]];
    seen[symbol[state]] += 1;
    bits[state] = log - (31 - Math.clz32(value));
    next[state] = (value << bits[state]) - size;
  }
  return { log, symbol, bits, next };
}

/** @param {number} symbol @returns {Fse} a code with one symbol and no bits */
const singleFse = (symbol) => ({
  log: 0,
  symbol: Uint8Array.of(symbol),
  bits: Uint8Array.of(0),
  next: Uint16Array.of(0),
});

/**
 * Read the description of an FSE code.
 *
 * @param {Uint8Array} bytes
 * @param {number} begin
 * @param {number} mostLog
 * @param {number} mostSymbol
 * @returns {{fse: Fse, end: number}}
 */
function readFse(bytes, begin, mostLog, mostSymbol) {
  let at = 8 * begin;
  const read = (/** @type {number} */ count) => {
    if (at + count > 8 * bytes.length) damaged();
    let value = 0;
    for (let k = 0; k < count; k += 1, at += 1) value |= ((bytes[at >> 3] >> (at & 7)) & 1) << k;
    return value;
  };
  const log = read(4) + 5;
  if (log > mostLog) damaged();
  let left = 1 << log;
  /** @type {number[]} */
  const counts = [];
  while (left > 0) {
    // Of the values up to `left + 1`, the lower ones take one bit less.
    const width = 32 - Math.clz32(left + 1);
    const threshold = 2 ** width - 2 - left;
    let value = read(width - 1);
    if (value >= threshold) {
      value += read(1) << (width - 1);
      if (value >= 1 << (width - 1)) value -= threshold;
    }
    const count = value - 1;
    left -= Math.abs(count);
    counts.push(count);
    if (count === 0) {
      for (let repeat = 3; repeat === 3; ) {
        repeat = read(2);
        for (let k = 0; k < repeat; k += 1) counts.push(0);
      }
    }
    if (counts.length > mostSymbol + 1) damaged();
  }
  if (left !== 0) damaged();
  return { fse: makeFse(counts, log), end: (at + 7) >> 3 };
}

/** A table of a Huffman code: for the next `log` bits `symbol << 4 | length`.
 *  @typedef {{log: number, table: Uint16Array}} Huffman */

/**
 * Read the description of a Huffman code.
 *
 * @param {Uint8Array} bytes
 * @returns {{huffman: Huffman, end: number}}
 */
function readHuffman(bytes) {
  if (bytes.length === 0) damaged();
  const head = bytes[0];
  /** @type {number[]} */
  const weights = [];
  let end = 1;
  if (head >= 128) {
    const count = head - 127;
    end += (count + 1) >> 1;
    if (end > bytes.length) damaged();
    for (let k = 0; k < count; k += 1) {
      weights.push(k % 2 ? bytes[1 + (k >> 1)] & 15 : bytes[1 + (k >> 1)] >> 4);
    }
  } else {
    end += head;
    if (end > bytes.length) damaged();
    const { fse, end: from } = readFse(bytes.subarray(0, end), 1, 6, 255);
    const bits = new BackwardBits(bytes.subarray(from, end));
    const states = [bits.read(fse.log), bits.read(fse.log)];
    for (let turn = 0; ; turn ^= 1) {
      if (bits.left < 0 || weights.length > 254) damaged();
      const state = states[turn];
      weights.push(fse.symbol[state]);
      states[turn] = fse.next[state] + bits.read(fse.bits[state]);
      if (bits.left < 0) {
        weights.push(fse.symbol[states[turn ^ 1]]);
        break;
      }
    }
  }
  let sum = 0;
  for (const weight of weights) {
    if (weight > 11) damaged();
    sum += weight > 0 ? 1 << (weight - 1) : 0;
  }
  if (sum === 0 || weights.length > 255) damaged();
  const log = 32 - Math.clz32(sum);
  const left = (1 << log) - sum;
  if (log > 11 || (left & (left - 1)) !== 0) damaged();
  weights.push(32 - Math.clz32(left));
  const ones = weights.filter((weight) => weight === 1).length;
  if (ones < 2 || ones % 2) damaged();
  const table = new Uint16Array(1 << log);
  let at = 0;
  for (let weight = 1; weight <= log; weight += 1) {
    weights.forEach((own, symbol) => {
      if (own !== weight) return;
      table.fill((symbol << 4) | (log + 1 - weight), at, at + (1 << (weight - 1)));
      at += 1 << (weight - 1);
    });
  }
  return { huffman: { log, table }, end };
}

/**
 * Decode a stream of literals.
 *
 * @param {Huffman} huffman @param {Uint8Array} bytes
 * @param {Uint8Array} out @param {number} begin @param {number} end
 */
function decodeStream({ log, table }, bytes, out, begin, end) {
  const bits = new BackwardBits(bytes);
  const padded = bits.bytes;
  const mask = (1 << log) - 1;
  let at = bits.left + 32 - log;
  for (let to = begin; to < end; to += 1) {
    if (at < 0) damaged();
    const byte = at >> 3;
    const entry =
      table[
        ((padded[byte] | (padded[byte + 1] << 8) | (padded[byte + 2] << 16)) >>> (at & 7)) & mask
      ];
    at -= entry & 15;
    out[to] = entry >> 4;
  }
  // RFC 8878, 4.2.2: a stream that isn't exactly consumed is faulty.
  if (at !== 32 - log) damaged();
}

/* ---------------------------------------------------------------------------------- blocks ---- */

const LITERAL_BASE = [
  0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 18, 20, 22, 24, 28, 32, 40, 48, 64, 128,
  256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536,
];
const LITERAL_BITS = [
  0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3, 4, 6, 7, 8, 9, 10, 11, 12,
  13, 14, 15, 16,
];
const MATCH_BASE = [
  ...Array.from({ length: 32 }, (_, code) => code + 3),
  35,
  37,
  39,
  41,
  43,
  47,
  51,
  59,
  67,
  83,
  99,
  131,
  259,
  515,
  1027,
  2051,
  4099,
  8195,
  16387,
  32771,
  65539,
];
const MATCH_BITS = [
  ...Array(32).fill(0),
  1,
  1,
  1,
  1,
  2,
  2,
  3,
  3,
  4,
  4,
  5,
  7,
  8,
  9,
  10,
  11,
  12,
  13,
  14,
  15,
  16,
];
const LITERAL_COUNTS = [
  4, 3, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 3, 2, 1, 1, 1, 1, 1,
  -1, -1, -1, -1,
];
const MATCH_COUNTS = [
  1, 4, 3, 2, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
  1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1,
];
const OFFSET_COUNTS = [
  1, 1, 1, 1, 1, 1, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1,
];
/** The codes of literal lengths, offsets and match lengths: default, most states, most symbols. */
const CODES = /** @type {const} */ ([
  { predefined: makeFse(LITERAL_COUNTS, 6), mostLog: 9, mostSymbol: 35 },
  { predefined: makeFse(OFFSET_COUNTS, 5), mostLog: 8, mostSymbol: 31 },
  { predefined: makeFse(MATCH_COUNTS, 6), mostLog: 9, mostSymbol: 52 },
]);

/** What the blocks of a frame share. */
class FrameState {
  /** @param {Uint8Array} content */
  constructor(content) {
    this.content = content;
    /** Bytes of the content that are there. */
    this.out = 0;
    /** @type {Huffman | null} */
    this.huffman = null;
    /** @type {(Fse | null)[]} */
    this.codes = [null, null, null];
    this.offsets = [1, 4, 8];
  }

  /** @param {Uint8Array} block @param {number} most bytes of its content */
  decodeBlock(block, most) {
    const { literals, end } = this.#readLiterals(block, most);
    this.#readSequences(
      block.subarray(end),
      literals,
      Math.min(this.out + most, this.content.length),
    );
  }

  /** @param {Uint8Array} block @param {number} most */
  #readLiterals(block, most) {
    if (block.length < 2) damaged();
    const kind = block[0] & 3;
    const form = (block[0] >> 2) & 3;
    const head = block[0] | (block[1] << 8) | ((block[2] ?? 0) << 16);
    if (kind < 2) {
      const width = form === 3 ? 3 : form === 1 ? 2 : 1;
      const count = width === 1 ? (head >> 3) & 31 : width === 2 ? (head & 0xffff) >> 4 : head >> 4;
      const end = width + (kind === 0 ? count : 1);
      if (count > most || end > block.length) damaged();
      const literals =
        kind === 0 ? block.subarray(width, end) : new Uint8Array(count).fill(block[width]);
      return { literals, end };
    }
    const width = form < 2 ? 3 : form + 2;
    if (block.length < width) damaged();
    const digits = form < 2 ? 10 : form === 2 ? 14 : 18;
    let value = 0;
    for (let k = width - 1; k >= 0; k -= 1) value = value * 256 + block[k];
    const count = Math.floor(value / 16) % 2 ** digits;
    const stored = Math.floor(value / 2 ** (4 + digits));
    const end = width + stored;
    if (count > most || end > block.length) damaged();
    let streams = block.subarray(width, end);
    if (kind === 2) {
      const { huffman, end: from } = readHuffman(streams);
      this.huffman = huffman;
      streams = streams.subarray(from);
    }
    if (this.huffman === null) return damaged();
    const literals = new Uint8Array(count);
    if (form === 0) {
      if (count === 0) damaged();
      decodeStream(this.huffman, streams, literals, 0, count);
      return { literals, end };
    }
    if (count < 6 || streams.length < 10) damaged();
    const quarter = (count + 3) >> 2;
    let at = 6;
    for (let k = 0; k < 4; k += 1) {
      const size = k < 3 ? streams[2 * k] | (streams[2 * k + 1] << 8) : streams.length - at;
      if (size <= 0 || at + size > streams.length || (k === 3 && 3 * quarter > count)) damaged();
      decodeStream(
        this.huffman,
        streams.subarray(at, at + size),
        literals,
        k * quarter,
        k < 3 ? (k + 1) * quarter : count,
      );
      at += size;
    }
    return { literals, end };
  }

  /**
   * @param {Uint8Array} bytes
   * @param {Uint8Array} literals
   * @param {number} most where output ends
   */
  #readSequences(bytes, literals, most) {
    if (bytes.length === 0) damaged();
    const [first] = bytes;
    const width = first < 128 ? 1 : first < 255 ? 2 : 3;
    if (bytes.length < width) damaged();
    const count =
      width === 1
        ? first
        : width === 2
          ? ((first - 128) << 8) + bytes[1]
          : bytes[1] + (bytes[2] << 8) + 0x7f00;
    const { content } = this;
    let from = 0;
    if (count === 0) {
      if (bytes.length !== width) damaged();
    } else {
      let at = width + 1;
      if (at > bytes.length || bytes[width] & 3) damaged();
      for (let k = 0; k < 3; k += 1)
        at = this.#readCode(bytes, at, k, (bytes[width] >> (6 - 2 * k)) & 3);
      from = this.#execute(new BackwardBits(bytes.subarray(at)), count, literals, most);
    }
    const rest = literals.length - from;
    if (this.out + rest > most) damaged();
    content.set(literals.subarray(from), this.out);
    this.out += rest;
  }

  /** @param {Uint8Array} bytes @param {number} at @param {number} k @param {number} mode
   *  @returns {number} where the next code begins */
  #readCode(bytes, at, k, mode) {
    const { predefined, mostLog, mostSymbol } = CODES[k];
    if (mode === 0) this.codes[k] = predefined;
    else if (mode === 1) {
      if (at >= bytes.length || bytes[at] > mostSymbol) damaged();
      this.codes[k] = singleFse(bytes[at]);
      return at + 1;
    } else if (mode === 2) {
      const { fse, end } = readFse(bytes, at, mostLog, mostSymbol);
      this.codes[k] = fse;
      return end;
    } else if (this.codes[k] === null) damaged();
    return at;
  }

  /** @param {BackwardBits} bits @param {number} count @param {Uint8Array} literals
   *  @param {number} most @returns {number} how many literals were used */
  #execute(bits, count, literals, most) {
    const [lengths, offsets, matches] = /** @type {[Fse, Fse, Fse]} */ (this.codes);
    let length = bits.read(lengths.log);
    let offset = bits.read(offsets.log);
    let match = bits.read(matches.log);
    const { content } = this;
    let { out } = this;
    let from = 0;
    for (let k = 0; k < count; k += 1) {
      const offsetCode = offsets.symbol[offset];
      const far = 2 ** offsetCode + bits.read(offsetCode);
      const matchCode = matches.symbol[match];
      const matchNbytes = MATCH_BASE[matchCode] + bits.read(MATCH_BITS[matchCode]);
      const literalCode = lengths.symbol[length];
      const literalNbytes = LITERAL_BASE[literalCode] + bits.read(LITERAL_BITS[literalCode]);
      const distance = this.#distance(far, literalNbytes);
      if (from + literalNbytes > literals.length || out + literalNbytes + matchNbytes > most)
        damaged();
      for (const end = from + literalNbytes; from < end; from += 1, out += 1) {
        content[out] = literals[from];
      }
      if (distance > out) damaged();
      // Copies of a few bytes take less time one by one than by a call.
      if (matchNbytes > 64 && distance >= matchNbytes) {
        content.copyWithin(out, out - distance, out - distance + matchNbytes);
        out += matchNbytes;
      } else
        for (const end = out + matchNbytes; out < end; out += 1)
          content[out] = content[out - distance];
      if (k + 1 < count) {
        length = lengths.next[length] + bits.read(lengths.bits[length]);
        match = matches.next[match] + bits.read(matches.bits[match]);
        offset = offsets.next[offset] + bits.read(offsets.bits[offset]);
      }
      if (bits.left < 0) damaged();
    }
    if (bits.left !== 0) damaged();
    this.out = out;
    return from;
  }

  /** @param {number} value of an offset @param {number} literalNbytes @returns {number} */
  #distance(value, literalNbytes) {
    const recent = this.offsets;
    if (value > 3) {
      this.offsets = [value - 3, recent[0], recent[1]];
      return value - 3;
    }
    const place = value - 1 + (literalNbytes === 0 ? 1 : 0);
    if (place === 0) return recent[0];
    const distance = place === 3 ? recent[0] - 1 : recent[place];
    if (distance === 0) damaged();
    this.offsets =
      place === 1 ? [distance, recent[0], recent[2]] : [distance, recent[0], recent[1]];
    return distance;
  }
}

/* -------------------------------------------------------------------------------- checksum ---- */

const P1 = 0x9e3779b185ebca87n;
const P2 = 0xc2b2ae3d27d4eb4fn;
const P3 = 0x165667b19e3779f9n;
const P4 = 0x85ebca77c2b2ae63n;
const P5 = 0x27d4eb2f165667c5n;
const wrap = (/** @type {bigint} */ value) => BigInt.asUintN(64, value);
const rotate = (/** @type {bigint} */ value, /** @type {bigint} */ bits) =>
  wrap((value << bits) | (value >> (64n - bits)));
const round = (/** @type {bigint} */ sum, /** @type {bigint} */ lane) =>
  wrap(rotate(wrap(sum + lane * P2), 31n) * P1);

/**
 * Return the XXH64 of bytes, with the seed 0.
 *
 * @param {Uint8Array} bytes
 * @returns {bigint}
 */
export function xxh64(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.length);
  let at = 0;
  let hash = P5;
  if (bytes.length >= 32) {
    const sums = [wrap(P1 + P2), P2, 0n, wrap(-P1)];
    for (; at + 32 <= bytes.length; at += 32) {
      for (let k = 0; k < 4; k += 1) sums[k] = round(sums[k], view.getBigUint64(at + 8 * k, true));
    }
    const [a, b, c, d] = sums;
    hash = wrap(rotate(a, 1n) + rotate(b, 7n) + rotate(c, 12n) + rotate(d, 18n));
    for (const sum of sums) hash = wrap((hash ^ round(0n, sum)) * P1 + P4);
  }
  hash = wrap(hash + BigInt(bytes.length));
  for (; at + 8 <= bytes.length; at += 8) {
    hash = wrap(rotate(hash ^ round(0n, view.getBigUint64(at, true)), 27n) * P1 + P4);
  }
  if (at + 4 <= bytes.length) {
    hash = wrap(rotate(hash ^ wrap(BigInt(view.getUint32(at, true)) * P1), 23n) * P2 + P3);
    at += 4;
  }
  for (; at < bytes.length; at += 1) {
    hash = wrap(rotate(hash ^ wrap(BigInt(bytes[at]) * P5), 11n) * P1);
  }
  hash = wrap((hash ^ (hash >> 33n)) * P2);
  hash = wrap((hash ^ (hash >> 29n)) * P3);
  return hash ^ (hash >> 32n);
}
