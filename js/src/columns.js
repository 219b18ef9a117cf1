// @ts-check
/** Packed arrays and columns of strings (REQ-DOC-024, REQ-DOC-026). @module */
import { CkptError, refuse } from "./errors.js";
import { fromUtf8, utf8 } from "./text.js";

/**
 * The integers of a packed array. Those of eight bytes are doubles: every column has limits below
 * 2^53, or sizes that no valid document can state exactly to be larger.
 *
 * @typedef {Uint8Array | Uint16Array | Uint32Array | Float64Array} Numbers
 */

/** @param {string} detail @returns {never} */
const malformed = (detail) => refuse("PACKED_FORM", "REQ-DOC-024", detail);

/**
 * Parse a packed array.
 *
 * @param {unknown} value `[width, bytes]`
 * @returns {Numbers}
 */
export function parsePacked(value) {
  if (!Array.isArray(value) || value.length !== 2 || !(value[1] instanceof Uint8Array)) {
    return malformed("a packed array isn't a width and bytes");
  }
  const [width, planes] = /** @type {[unknown, Uint8Array]} */ (value);
  if (width !== 1 && width !== 2 && width !== 4 && width !== 8) {
    return malformed("a packed array has another width than 1, 2, 4 or 8");
  }
  if (planes.length % width !== 0) malformed("the bytes of a packed array aren't whole integers");
  const count = planes.length / width;
  if (width === 1) return planes;
  const numbers =
    width === 2
      ? new Uint16Array(count)
      : width === 4
        ? new Uint32Array(count)
        : new Float64Array(count);
  let isWide = false;
  for (let at = 0; at < count; at += 1) {
    if (width === 8 && planes[7 * count + at] & 128) malformed("an integer is 2^63 or more");
    let number = 0;
    for (let plane = width - 1; plane >= 0; plane -= 1) {
      number = number * 256 + planes[plane * count + at];
    }
    numbers[at] = number;
    isWide ||= number >= 2 ** (4 * width);
  }
  if (!isWide) malformed("a packed array has a larger width than needed");
  return numbers;
}

/**
 * Parse a packed array to exact integers, those above 2^53 as BigInt.
 *
 * @param {unknown} value
 * @returns {(number | bigint)[]}
 */
export function parsePackedExactly(value) {
  const numbers = parsePacked(value);
  if (!(numbers instanceof Float64Array)) return Array.from(numbers);
  const planes = /** @type {[number, Uint8Array]} */ (value)[1];
  return Array.from(numbers, (number, at) => {
    if (number <= Number.MAX_SAFE_INTEGER) return number;
    let exact = 0n;
    for (let plane = 7; plane >= 0; plane -= 1) {
      exact = exact * 256n + BigInt(planes[plane * numbers.length + at]);
    }
    return exact;
  });
}

/**
 * Undo the zigzag of a column of signed integers: 0, 1, 2, 3 are 0, -1, 1, -2.
 *
 * @param {Numbers} numbers
 * @returns {Float64Array}
 */
export function unzigzag(numbers) {
  const signed = new Float64Array(numbers.length);
  for (let at = 0; at < numbers.length; at += 1) {
    const number = numbers[at];
    signed[at] = number % 2 === 0 ? number / 2 : -(number + 1) / 2;
  }
  return signed;
}

/** @param {string} detail @returns {never} */
const badColumn = (detail) => refuse("COLUMN_FORM", "REQ-DOC-026", detail);

/**
 * Parse a column of strings.
 *
 * @param {unknown} value `[lengths, text]`
 * @returns {string[]}
 */
export function parseStrings(value) {
  if (!Array.isArray(value) || value.length !== 2 || typeof value[1] !== "string") {
    return badColumn("a column of strings isn't lengths and a text");
  }
  const lengths = parsePacked(value[0]);
  const text = value[1];
  const bytes = utf8(text);
  const isAscii = bytes.length === text.length;
  const strings = new Array(lengths.length);
  let at = 0;
  for (let row = 0; row < lengths.length; row += 1) {
    const end = at + lengths[row];
    if (end > bytes.length) badColumn("the lengths of strings exceed the text");
    if (isAscii) strings[row] = text.slice(at, end);
    else {
      const entry = fromUtf8(bytes.subarray(at, end));
      if (entry === null) badColumn("a length cuts the text within a character");
      strings[row] = entry;
    }
    at = end;
  }
  if (at !== bytes.length) badColumn("the lengths of strings leave a rest of the text");
  return strings;
}

/** Whether an error is one of a packed array. @param {unknown} error */
export const isPackedForm = (error) => error instanceof CkptError && error.code === "PACKED_FORM";
