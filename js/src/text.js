// @ts-check
/** Strings: UTF-8, order by code points, and hexadecimal digits. @module */

const encoder = new TextEncoder();
const decoder = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

/** Encode a string as UTF-8. @param {string} text */
export const utf8 = (text) => encoder.encode(text);

/**
 * Decode UTF-8.
 *
 * @param {Uint8Array} bytes
 * @returns {string | null} null if the bytes aren't UTF-8
 */
export function fromUtf8(bytes) {
  try {
    return decoder.decode(bytes);
  } catch {
    return null;
  }
}

/** Count the bytes of a string in UTF-8. @param {string} text */
export function utf8Length(text) {
  let nbytes = 0;
  for (let at = 0; at < text.length; at += 1) {
    const unit = text.charCodeAt(at);
    if (unit < 0x80) nbytes += 1;
    else if (unit < 0x800) nbytes += 2;
    else if (unit >= 0xd800 && unit < 0xdc00) {
      nbytes += 4;
      at += 1;
    } else nbytes += 3;
  }
  return nbytes;
}

/**
 * Compare two strings by their code points, which is the order of their UTF-8 bytes.
 *
 * @param {string} a @param {string} b
 * @returns {number} below, equal to or above 0
 */
export function compareText(a, b) {
  const count = Math.min(a.length, b.length);
  for (let at = 0; at < count; at += 1) {
    const x = a.charCodeAt(at);
    const y = b.charCodeAt(at);
    if (x !== y) {
      // Surrogates, of code points from U+10000 on, come after all other units.
      const isHighX = x >= 0xd800 && x < 0xe000;
      const isHighY = y >= 0xd800 && y < 0xe000;
      if (isHighX !== isHighY) return isHighX ? 1 : -1;
      return x - y;
    }
  }
  return a.length - b.length;
}

/** @param {Uint8Array} a @param {Uint8Array} b @returns {number} below, equal to or above 0 */
export function compareBytes(a, b) {
  const count = Math.min(a.length, b.length);
  for (let at = 0; at < count; at += 1) {
    if (a[at] !== b[at]) return a[at] - b[at];
  }
  return a.length - b.length;
}

/** @param {Uint8Array} a @param {Uint8Array} b */
export const equalBytes = (a, b) => a.length === b.length && compareBytes(a, b) === 0;

const HEX = [...Array(256).keys()].map((byte) => byte.toString(16).padStart(2, "0"));

/** Return bytes as lower-case hexadecimal digits. @param {Uint8Array} bytes */
export function toHex(bytes) {
  let text = "";
  for (let at = 0; at < bytes.length; at += 1) text += HEX[bytes[at]];
  return text;
}

/** Return the bytes of hexadecimal digits, of an even number. @param {string} text */
export function fromHex(text) {
  const bytes = new Uint8Array(text.length / 2);
  for (let at = 0; at < bytes.length; at += 1) {
    bytes[at] = Number.parseInt(text.slice(2 * at, 2 * at + 2), 16);
  }
  return bytes;
}

/** Return a digest as text. @param {Uint8Array} digest 32 bytes */
export const digestText = (digest) => `blake3:${toHex(digest)}`;

/** @param {string} text such as `blake3:9f…` @returns {Uint8Array} */
export const digestBytes = (text) => fromHex(text.slice("blake3:".length));
