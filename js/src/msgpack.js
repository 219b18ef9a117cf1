// @ts-check
/** A decoder of the strict profile of msgpack on page 10, and of the envelope around documents. */
import { blake3 } from "./blake3.js";
import { refuse } from "./errors.js";
import { inflate } from "./inflate.js";
import * as limits from "./limits.js";
import { compareBytes, equalBytes, fromUtf8 } from "./text.js";

/**
 * A value: integers beyond 2^53 are BigInt; maps are `Map`s.
 *
 * @typedef {null | boolean | number | bigint | string | Uint8Array | Array<*>
 *   | Map<string, *>} Value
 */
/** @typedef {Map<string, Value>} ValueMap */

/** @typedef {{items: number, containers: number, end: number}} Scan */

/** @param {string} detail @returns {never} */
const malformed = (detail) => refuse("MSGPACK_SYNTAX", "REQ-DOC-021", detail);

/**
 * Check nesting, counts and lengths, before any value is built (REQ-DOC-023).
 *
 * @param {Uint8Array} bytes
 * @param {object} [most]
 * @param {number} [most.items] @param {number} [most.containers]
 * @returns {Scan}
 */
export function scanMsgpack(bytes, most = {}) {
  const { items: mostItems = limits.MSGPACK_ITEMS, containers: mostContainers = Infinity } = most;
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.length);
  let at = 0;
  let items = 0;
  let containers = 0;
  /** Values that each open container still needs. */
  const left = new Float64Array(limits.MSGPACK_DEPTH + 1);
  let depth = 0;
  left[0] = 1;
  /** @param {number} count */
  const need = (count) => {
    if (at + count > bytes.length) malformed("a value ends early");
  };
  while (depth > 0 || left[0] > 0) {
    need(1);
    const tag = bytes[at];
    at += 1;
    items += 1;
    if (items > mostItems) {
      refuse("LIMIT_EXCEEDED", "REQ-DOC-023", `there are more than ${mostItems} values`);
    }
    left[depth] -= 1;
    /** @param {number} width @returns {number} the unsigned integer that gives a length */
    const length = (width) => {
      need(width);
      const value = width === 1 ? bytes[at] : width === 2 ? view.getUint16(at) : view.getUint32(at);
      at += width;
      return value;
    };
    let skipped = 0;
    let entries = -1;
    let isMap = false;
    if (tag < 0x80 || tag >= 0xe0) skipped = 0;
    else if (tag < 0x90) {
      entries = tag & 15;
      isMap = true;
    } else if (tag < 0xa0) entries = tag & 15;
    else if (tag < 0xc0) skipped = tag & 31;
    else {
      switch (tag) {
        case 0xc0:
        case 0xc2:
        case 0xc3:
          break;
        case 0xc1:
          malformed("a byte begins no value");
          break;
        case 0xc4:
        case 0xd9:
          skipped = length(1);
          break;
        case 0xc5:
        case 0xda:
          skipped = length(2);
          break;
        case 0xc6:
        case 0xdb:
          skipped = length(4);
          break;
        case 0xc7:
          skipped = length(1) + 1;
          break;
        case 0xc8:
          skipped = length(2) + 1;
          break;
        case 0xc9:
          skipped = length(4) + 1;
          break;
        case 0xca:
        case 0xce:
        case 0xd2:
          skipped = 4;
          break;
        case 0xcb:
        case 0xcf:
        case 0xd3:
          skipped = 8;
          break;
        case 0xcc:
        case 0xd0:
          skipped = 1;
          break;
        case 0xcd:
        case 0xd1:
          skipped = 2;
          break;
        case 0xd4:
        case 0xd5:
        case 0xd6:
        case 0xd7:
        case 0xd8:
          skipped = 1 + (1 << (tag - 0xd4));
          break;
        case 0xdc:
          entries = length(2);
          break;
        case 0xdd:
          entries = length(4);
          break;
        case 0xde:
        case 0xdf:
          entries = length(tag === 0xde ? 2 : 4);
          isMap = true;
      }
    }
    if (entries >= 0) {
      containers += 1;
      if (containers > mostContainers) {
        refuse("LIMIT_EXCEEDED", "REQ-LIM-001", `there are more than ${mostContainers} containers`);
      }
      depth += 1;
      if (depth > limits.MSGPACK_DEPTH) {
        refuse("DOC_DEPTH", "REQ-DOC-023", "containers nest too deeply");
      }
      left[depth] = isMap ? 2 * entries : entries;
      need(left[depth]);
    } else {
      need(skipped);
      at += skipped;
    }
    while (depth > 0 && left[depth] === 0) depth -= 1;
  }
  return { items, containers, end: at };
}

/**
 * Parse one canonical value.
 *
 * @param {Uint8Array} bytes
 * @param {object} [most] limits for this value, see `scanMsgpack`
 * @param {number} [most.items] @param {number} [most.containers]
 * @returns {Value}
 */
export function parseMsgpack(bytes, most) {
  const { end } = scanMsgpack(bytes, most);
  if (end !== bytes.length) malformed("something follows the value");
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.length);
  let at = 0;
  let isCanonical = true;
  /** @param {number} width @param {number} least the shorter form holds less */
  const length = (width, least) => {
    const value = width === 1 ? bytes[at] : width === 2 ? view.getUint16(at) : view.getUint32(at);
    at += width;
    if (value < least) isCanonical = false;
    return value;
  };
  /** @param {number} count */
  const string = (count) => {
    const text = fromUtf8(bytes.subarray(at, at + count));
    if (text === null) return refuse("DOC_ENCODING", "REQ-DOC-020", "a string isn't UTF-8");
    at += count;
    return text;
  };
  /** @param {number} count */
  const binary = (count) => {
    at += count;
    return bytes.subarray(at - count, at);
  };
  /** @param {number} count @returns {Value[]} */
  const array = (count) => {
    const values = new Array(count);
    for (let k = 0; k < count; k += 1) values[k] = value();
    return values;
  };
  /** @param {number} count @returns {ValueMap} */
  const map = (count) => {
    /** @type {ValueMap} */
    const values = new Map();
    let before = null;
    let twice = false;
    for (let k = 0; k < count; k += 1) {
      const tag = bytes[at];
      if (!((tag >= 0xa0 && tag < 0xc0) || (tag >= 0xd9 && tag <= 0xdb))) {
        refuse("MSGPACK_TYPE", "REQ-DOC-020", "the key of a map isn't a string");
      }
      const begin = at;
      const key = /** @type {string} */ (value());
      const header = tag < 0xc0 ? 1 : 1 + (1 << (tag - 0xd9));
      const raw = bytes.subarray(begin + header, at);
      if (before !== null && compareBytes(before, raw) >= 0) isCanonical = false;
      before = raw;
      twice ||= values.has(key);
      values.set(key, value());
    }
    if (twice) refuse("DOC_DUPLICATE_KEY", "REQ-DOC-020", "a map has one key twice");
    return values;
  };
  /** @returns {Value} */
  const value = () => {
    const tag = bytes[at];
    at += 1;
    if (tag < 0x80) return tag;
    if (tag >= 0xe0) return tag - 256;
    if (tag < 0x90) return map(tag & 15);
    if (tag < 0xa0) return array(tag & 15);
    if (tag < 0xc0) return string(tag & 31);
    switch (tag) {
      case 0xc0:
        return null;
      case 0xc2:
        return false;
      case 0xc3:
        return true;
      case 0xc4:
        return binary(length(1, 0));
      case 0xc5:
        return binary(length(2, 0x100));
      case 0xc6:
        return binary(length(4, 0x10000));
      case 0xcc:
        return length(1, 0x80);
      case 0xcd:
        return length(2, 0x100);
      case 0xce:
        return length(4, 0x10000);
      case 0xcf: {
        const number = view.getBigUint64(at);
        at += 8;
        if (number < 0x100000000n) isCanonical = false;
        return number <= Number.MAX_SAFE_INTEGER ? Number(number) : number;
      }
      case 0xd0:
      case 0xd1:
      case 0xd2:
      case 0xd3: {
        const width = 1 << (tag - 0xd0);
        const number =
          width === 1
            ? view.getInt8(at)
            : width === 2
              ? view.getInt16(at)
              : width === 4
                ? view.getInt32(at)
                : view.getBigInt64(at);
        at += width;
        const least = [-0x20, -0x80, -0x8000, -0x80000000][tag - 0xd0];
        if (number >= least) isCanonical = false;
        return typeof number === "bigint" &&
          number >= Number.MIN_SAFE_INTEGER &&
          number <= Number.MAX_SAFE_INTEGER
          ? Number(number)
          : number;
      }
      case 0xd9:
        return string(length(1, 32));
      case 0xda:
        return string(length(2, 0x100));
      case 0xdb:
        return string(length(4, 0x10000));
      case 0xdc:
        return array(length(2, 16));
      case 0xdd:
        return array(length(4, 0x10000));
      case 0xde:
        return map(length(2, 16));
      case 0xdf:
        return map(length(4, 0x10000));
      default:
        return refuse("MSGPACK_TYPE", "REQ-DOC-020", "a float or an extension isn't allowed");
    }
  };
  const result = value();
  if (!isCanonical) refuse("DOC_NOT_CANONICAL", "REQ-DOC-022", "the bytes aren't canonical");
  return result;
}

/**
 * Open the envelope of a msgpack document: digest, limits and compression (page 10).
 *
 * @param {Uint8Array} bytes
 * @param {Uint8Array | null} [expected] the digest given where the document is named
 * @returns {{digest: Uint8Array, signedNbytes: number, content: Uint8Array}} the inflated bytes
 */
export function openEnvelope(bytes, expected = null) {
  if (bytes.length > limits.MSGPACK_NBYTES) {
    refuse("LIMIT_EXCEEDED", "REQ-DOC-008", "the document is too large");
  }
  const envelope = parseMsgpack(bytes);
  if (!(envelope instanceof Map) || [...envelope.keys()].join() !== "digest,nbytes,signed") {
    return refuse("DOC_SCHEMA", "REQ-DOC-025", "the document isn't digest, nbytes and signed");
  }
  const digest = envelope.get("digest");
  const nbytes = envelope.get("nbytes");
  const signed = envelope.get("signed");
  if (
    !(digest instanceof Uint8Array) ||
    !(signed instanceof Uint8Array) ||
    !(typeof nbytes === "number" || typeof nbytes === "bigint") ||
    nbytes < 0
  ) {
    return refuse("DOC_SCHEMA", "REQ-DOC-025", "a member of the document has the wrong type");
  }
  if (!equalBytes(blake3(signed), digest)) {
    refuse("DOC_DIGEST", "REQ-DOC-025", "the content of the document doesn't have its digest");
  }
  if (expected !== null && !equalBytes(expected, digest)) {
    refuse("DOC_DIGEST", "REQ-OPN-003", "the document isn't the one that was named by its digest");
  }
  const most = Math.min(
    limits.MSGPACK_NBYTES,
    Math.max(limits.INFLATED_NBYTES, limits.INFLATED_RATIO * signed.length),
  );
  if (nbytes > most) {
    refuse("LIMIT_EXCEEDED", "REQ-DOC-028", `${nbytes} bytes to inflate are more than ${most}`);
  }
  return { digest, signedNbytes: signed.length, content: inflate(signed, Number(nbytes)) };
}

/**
 * Parse an index or part up to its msgpack: a map.
 *
 * @param {Uint8Array} bytes @param {Uint8Array | null} [expected] its digest
 * @returns {{digest: Uint8Array, signedNbytes: number, members: ValueMap}}
 */
export function parseTables(bytes, expected = null) {
  const { digest, signedNbytes, content } = openEnvelope(bytes, expected);
  const members = parseMsgpack(content, {
    items: Math.min(
      limits.MSGPACK_ITEMS,
      limits.FREE_ITEMS + Math.floor(signedNbytes / limits.ROW_NBYTES),
    ),
    containers: limits.MSGPACK_CONTAINERS,
  });
  if (!(members instanceof Map)) {
    return refuse("DOC_SCHEMA", "REQ-DOC-025", "the content of the document isn't a map");
  }
  return { digest, signedNbytes, members };
}
