// @ts-check
/**
 * Strict JSON, for documents (page 10) and for headers of shards (page 50).
 *
 * The parser keeps what `JSON.parse` loses: keys that are there twice, and the spelling of numbers.
 *
 * @module
 */
import { refuse } from "./errors.js";
import { compareText } from "./text.js";

/** @typedef {null | boolean | number | string | JsonArray | JsonObject} Json */
/** @typedef {Json[]} JsonArray */
/** @typedef {{[key: string]: Json}} JsonObject */

/**
 * What the strict parser refuses, and how.
 *
 * @typedef {object} JsonRules
 * @property {(detail: string) => never} syntax
 * @property {(key: string) => never} duplicate
 * @property {(spelling: string) => Json} number reads a number, or refuses it
 */

/**
 * Measure how deep objects and arrays nest, without parsing.
 *
 * @param {Uint8Array} bytes
 * @returns {number}
 */
export function jsonDepth(bytes) {
  let depth = 0;
  let deepest = 0;
  let inString = false;
  for (let at = 0; at < bytes.length; at += 1) {
    const byte = bytes[at];
    if (inString) {
      if (byte === 0x5c) at += 1;
      else if (byte === 0x22) inString = false;
    } else if (byte === 0x22) inString = true;
    else if (byte === 0x7b || byte === 0x5b) deepest = Math.max(deepest, (depth += 1));
    else if (byte === 0x7d || byte === 0x5d) depth -= 1;
  }
  return deepest;
}

const NUMBER = /-?(?:Infinity|NaN|(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)/y;
const STRING = /[^"\\\u0000-\u001f]*/y;
const SPACE = /[ \t\n\r]*/y;
const ESCAPES = /** @type {Record<string, string>} */ ({
  '"': '"',
  "\\": "\\",
  "/": "/",
  b: "\b",
  f: "\f",
  n: "\n",
  r: "\r",
  t: "\t",
});

/**
 * Parse one JSON text.
 *
 * @param {string} text @param {JsonRules} rules
 * @returns {Json}
 */
export function parseJson(text, rules) {
  let at = 0;
  const space = () => {
    SPACE.lastIndex = at;
    SPACE.test(text);
    at = SPACE.lastIndex;
  };
  const string = () => {
    at += 1;
    let value = "";
    for (;;) {
      STRING.lastIndex = at;
      STRING.test(text);
      value += text.slice(at, STRING.lastIndex);
      at = STRING.lastIndex;
      const next = text[at];
      if (next === '"') {
        at += 1;
        return value;
      }
      if (next !== "\\") rules.syntax("a string doesn't end, or has a control character");
      const escape = text[at + 1];
      if (escape === "u") {
        const digits = text.slice(at + 2, at + 6);
        if (!/^[0-9a-fA-F]{4}$/.test(digits)) rules.syntax("an escape has no four digits");
        value += String.fromCharCode(Number.parseInt(digits, 16));
        at += 6;
      } else {
        if (!Object.hasOwn(ESCAPES, escape ?? "")) rules.syntax("an unknown escape");
        value += ESCAPES[escape];
        at += 2;
      }
    }
  };
  /** @returns {Json} */
  const value = () => {
    const first = text[at];
    if (first === "{") {
      at += 1;
      const object = /** @type {JsonObject} */ ({});
      space();
      if (text[at] === "}") {
        at += 1;
        return object;
      }
      let twice = null;
      for (;;) {
        if (text[at] !== '"') rules.syntax("a member has no name");
        const key = string();
        space();
        if (text[at] !== ":") rules.syntax("a member has no value");
        at += 1;
        space();
        const member = value();
        if (Object.hasOwn(object, key)) twice ??= key;
        // An assignment to `__proto__` would set the prototype instead of a member.
        Object.defineProperty(object, key, {
          value: member,
          enumerable: true,
          writable: true,
          configurable: true,
        });
        space();
        const next = text[at];
        at += 1;
        if (next === "}") break;
        if (next !== ",") rules.syntax("an object doesn't end");
        space();
      }
      if (twice !== null) rules.duplicate(twice);
      return object;
    }
    if (first === "[") {
      at += 1;
      /** @type {JsonArray} */
      const array = [];
      space();
      if (text[at] === "]") {
        at += 1;
        return array;
      }
      for (;;) {
        array.push(value());
        space();
        const next = text[at];
        at += 1;
        if (next === "]") return array;
        if (next !== ",") rules.syntax("an array doesn't end");
        space();
      }
    }
    if (first === '"') return string();
    for (const [word, meaning] of /** @type {[string, Json][]} */ ([
      ["true", true],
      ["false", false],
      ["null", null],
    ])) {
      if (text.startsWith(word, at)) {
        at += word.length;
        return meaning;
      }
    }
    NUMBER.lastIndex = at;
    const found = NUMBER.exec(text);
    if (!found) return rules.syntax("a value is missing or misspelt");
    at += found[0].length;
    return rules.number(found[0]);
  };
  space();
  const result = value();
  space();
  if (at !== text.length) rules.syntax("something follows the value");
  return result;
}

/**
 * Return the canonical form of a value: sorted members, no spaces, no escapes but two.
 *
 * @param {Json} value
 * @returns {string}
 */
export function canonicalJson(value) {
  if (typeof value === "string") return `"${value.replace(/["\\]/g, "\\$&")}"`;
  if (Array.isArray(value)) return `[${value.map(canonicalJson).join(",")}]`;
  if (value !== null && typeof value === "object") {
    const keys = Object.keys(value).sort(compareText);
    return `{${keys.map((key) => `${canonicalJson(key)}:${canonicalJson(value[key])}`).join(",")}}`;
  }
  return String(value);
}

/** @param {string} code @param {string} clause @param {string} detail @returns {() => never} */
export const refusing = (code, clause, detail) => () => refuse(code, clause, detail);
