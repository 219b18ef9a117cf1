// @ts-check
/**
 * A strict inflater of zlib streams (RFC 1950, RFC 1951) with bounded output.
 *
 * `DecompressionStream` and the usual packages accept bytes after the stream, skip the checksum, or
 * inflate more than was asked for; a document of page 10 must not depend on these differences.
 *
 * @module
 */
import { refuse } from "./errors.js";

/** @param {string} detail @returns {never} */
const broken = (detail) => refuse("DOC_COMPRESSION", "REQ-DOC-027", detail);

const LENGTH_BASE = [
  3, 4, 5, 6, 7, 8, 9, 10, 11, 13, 15, 17, 19, 23, 27, 31, 35, 43, 51, 59, 67, 83, 99, 115, 131,
  163, 195, 227, 258,
];
const LENGTH_BITS = [
  0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 0,
];
const DISTANCE_BASE = [
  1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 33, 49, 65, 97, 129, 193, 257, 385, 513, 769, 1025, 1537, 2049,
  3073, 4097, 6145, 8193, 12289, 16385, 24577,
];
const DISTANCE_BITS = [
  0, 0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13,
];
const CODE_ORDER = [16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15];

/**
 * A table of a Huffman code: for the next `bits` bits of the stream `symbol << 4 | length`, 0 for
 * bits that no symbol has.
 *
 * @typedef {{bits: number, table: Uint16Array}} Code
 */

/**
 * @param {Uint8Array} lengths of each symbol's code, 0 for none
 * @param {boolean} mayBeSingle whether a single code of one bit is allowed, or none
 * @returns {Code}
 */
function makeCode(lengths, mayBeSingle) {
  const counts = new Uint16Array(16);
  for (const length of lengths) counts[length] += 1;
  let longest = 15;
  while (longest > 0 && counts[longest] === 0) longest -= 1;
  let left = 1;
  const next = new Uint16Array(16);
  let code = 0;
  counts[0] = 0;
  for (let length = 1; length <= 15; length += 1) {
    left = 2 * left - counts[length];
    if (left < 0) broken("a Huffman code has too many symbols");
    code = (code + counts[length - 1]) << 1;
    next[length] = code;
  }
  if (left > 0 && !(mayBeSingle && longest <= 1)) broken("a Huffman code is incomplete");
  const bits = Math.max(longest, 1);
  const table = new Uint16Array(1 << bits);
  lengths.forEach((length, symbol) => {
    if (length === 0) return;
    let reversed = 0;
    let value = next[length];
    next[length] += 1;
    for (let k = 0; k < length; k += 1) {
      reversed = (reversed << 1) | (value & 1);
      value >>= 1;
    }
    for (let at = reversed; at < table.length; at += 1 << length) {
      table[at] = (symbol << 4) | length;
    }
  });
  return { bits, table };
}

/** @type {[Code, Code] | null} */
let fixed = null;

/** @returns {[Code, Code]} */
function fixedCodes() {
  if (fixed === null) {
    const lengths = new Uint8Array(288);
    lengths.fill(8, 0, 144);
    lengths.fill(9, 144, 256);
    lengths.fill(7, 256, 280);
    lengths.fill(8, 280, 288);
    fixed = [makeCode(lengths, false), makeCode(new Uint8Array(32).fill(5), false)];
  }
  return fixed;
}

/**
 * Inflate one whole zlib stream.
 *
 * @param {Uint8Array} input the stream, and nothing after it
 * @param {number} nbytes the number of bytes that must come out
 * @returns {Uint8Array}
 * @throws {import("./errors.js").CkptError} `DOC_COMPRESSION` for any other stream
 */
export function inflate(input, nbytes) {
  if (
    input.length < 6 ||
    ((input[0] << 8) | input[1]) % 31 !== 0 ||
    (input[0] & 15) !== 8 ||
    input[0] >> 4 > 7 ||
    input[1] & 32
  ) {
    broken("the content isn't a zlib stream without a dictionary");
  }
  const output = new Uint8Array(nbytes);
  let at = 2;
  let out = 0;
  let hold = 0;
  let held = 0;
  /** @param {number} count up to 16 */
  const take = (count) => {
    while (held < count) {
      if (at >= input.length) broken("the stream ends early");
      hold |= input[at] << held;
      at += 1;
      held += 8;
    }
    const value = hold & ((1 << count) - 1);
    hold >>>= count;
    held -= count;
    return value;
  };
  /** @param {Code} code @returns {number} the next symbol */
  const decode = ({ bits, table }) => {
    while (held < bits && at < input.length) {
      hold |= input[at] << held;
      at += 1;
      held += 8;
    }
    const entry = table[hold & ((1 << bits) - 1)];
    const length = entry & 15;
    if (length === 0 || length > held) broken("the stream has an invalid code, or ends early");
    hold >>>= length;
    held -= length;
    return entry >> 4;
  };
  for (let isLast = false; !isLast; ) {
    isLast = take(1) === 1;
    const kind = take(2);
    if (kind === 0) {
      // Whole bytes that are held go back.
      at -= held >> 3;
      hold = 0;
      held = 0;
      if (at + 4 > input.length) broken("the stream ends early");
      const count = input[at] | (input[at + 1] << 8);
      if ((count ^ 0xffff) !== (input[at + 2] | (input[at + 3] << 8))) {
        broken("the length of a stored block is damaged");
      }
      at += 4;
      if (at + count > input.length) broken("the stream ends early");
      if (out + count > nbytes) broken(`the stream inflates to more than ${nbytes} bytes`);
      output.set(input.subarray(at, at + count), out);
      at += count;
      out += count;
      continue;
    }
    if (kind === 3) broken("a block has an unknown type");
    let [literals, distances] = kind === 1 ? fixedCodes() : [null, null];
    if (literals === null || distances === null) {
      const literalCount = take(5) + 257;
      const distanceCount = take(5) + 1;
      const codeCount = take(4) + 4;
      if (literalCount > 286 || distanceCount > 30) broken("a block has too many codes");
      const lengths = new Uint8Array(19);
      for (let k = 0; k < codeCount; k += 1) lengths[CODE_ORDER[k]] = take(3);
      const codes = makeCode(lengths, false);
      const all = new Uint8Array(literalCount + distanceCount);
      for (let k = 0; k < all.length; ) {
        const symbol = decode(codes);
        if (symbol < 16) {
          all[k] = symbol;
          k += 1;
          continue;
        }
        if (symbol === 16 && k === 0) broken("a block repeats a length before the first");
        const value = symbol === 16 ? all[k - 1] : 0;
        const count = symbol === 16 ? 3 + take(2) : symbol === 17 ? 3 + take(3) : 11 + take(7);
        if (k + count > all.length) broken("a block repeats a length too often");
        all.fill(value, k, k + count);
        k += count;
      }
      if (all[256] === 0) broken("a block has no end");
      literals = makeCode(all.subarray(0, literalCount), true);
      distances = makeCode(all.subarray(literalCount), true);
    }
    for (;;) {
      const symbol = decode(literals);
      if (symbol < 256) {
        if (out >= nbytes) broken(`the stream inflates to more than ${nbytes} bytes`);
        output[out] = symbol;
        out += 1;
        continue;
      }
      if (symbol === 256) break;
      if (symbol > 285) broken("the stream has an invalid length");
      const length = LENGTH_BASE[symbol - 257] + take(LENGTH_BITS[symbol - 257]);
      const far = decode(distances);
      if (far > 29) broken("the stream has an invalid distance");
      const distance = DISTANCE_BASE[far] + take(DISTANCE_BITS[far]);
      if (distance > out) broken("the stream refers to bytes before its begin");
      if (out + length > nbytes) broken(`the stream inflates to more than ${nbytes} bytes`);
      if (distance >= length) {
        output.copyWithin(out, out - distance, out - distance + length);
      } else {
        for (let k = 0; k < length; k += 1) output[out + k] = output[out + k - distance];
      }
      out += length;
    }
  }
  at -= held >> 3;
  if (out !== nbytes) broken(`the stream inflates to ${out} bytes instead of ${nbytes}`);
  if (at + 4 !== input.length) broken("the stream ends early, or something follows it");
  const stated = new DataView(input.buffer, input.byteOffset + at, 4).getUint32(0);
  if (adler32(output) !== stated) broken("the checksum of the stream is wrong");
  return output;
}

/** @param {Uint8Array} bytes */
function adler32(bytes) {
  let low = 1;
  let high = 0;
  for (let at = 0; at < bytes.length; ) {
    const end = Math.min(at + 3800, bytes.length);
    for (; at < end; at += 1) high += low += bytes[at];
    low %= 65521;
    high %= 65521;
  }
  return ((high << 16) | low) >>> 0;
}
