// @ts-check
/** Trees: the values of leaves and streams (page 10). @module */
import { parseStrings } from "./columns.js";
import { DTYPES, fromBfloat16, fromFloat16, toElements, toFloat32 } from "./dtypes.js";
import { CkptError, refuse } from "./errors.js";
import * as limits from "./limits.js";
import { parseMsgpack, scanMsgpack } from "./msgpack.js";
import { compareBytes, toHex, utf8 } from "./text.js";

/** @typedef {{kind: "float" | "complex", bytes: Uint8Array}} FloatNode */
/**
 * @typedef {{kind: "list" | "tuple", items: Tree[]} | {kind: "set" | "frozenset", items: Tree[]}
 *   | {kind: "deque", items: Tree[], maxlen: number | bigint | null}} SequenceNode
 */
/** @typedef {{kind: "dict" | "ordered_dict" | "counter", entries: [Tree, Tree][]}} DictNode */
/** @typedef {{kind: "array", dtype: string, shape: number[], bytes: Uint8Array}} ArrayNode */
/** @typedef {{kind: "scalar", dtype: string, bytes: Uint8Array}} ScalarNode */
/** @typedef {{kind: "tensor", name: string, library: "torch" | "numpy"}} TensorNode */
/** @typedef {{kind: "dtype" | "device", name: string}} NameNode */
/** @typedef {{kind: "size", extents: number[]}} SizeNode */
/**
 * A value of a tree, with all that distinguishes its types. Integers beyond 2^53 are BigInt.
 *
 * @typedef {null | boolean | number | bigint | string | Uint8Array | FloatNode | SequenceNode
 *   | DictNode | ArrayNode | ScalarNode | TensorNode | NameNode | SizeNode} Tree
 */

/** @param {string} detail @param {string} [clause] @returns {never} */
const malformed = (detail, clause = "REQ-TRE-001") => refuse("TREE_TAG", clause, detail);

/** @typedef {import("./msgpack.js").Value} Value */

/** @param {Value} value @returns {value is number | bigint} */
const isInteger = (value) => typeof value === "number" || typeof value === "bigint";

/** @param {Value} value @param {number} length @returns {Uint8Array} */
function bytesOf(value, length) {
  if (!(value instanceof Uint8Array) || (length >= 0 && value.length !== length)) {
    return malformed("a value has other bytes than its type needs");
  }
  return value;
}

/** @param {Value} value @returns {string} */
const stringOf = (value) =>
  typeof value === "string" ? value : malformed("an entry of a value isn't a string");

/** @param {Value} value @returns {string} */
function dtypeName(value) {
  if (typeof value !== "string" || !DTYPES.has(value)) return malformed("an unknown dtype");
  return value;
}

/** @param {Value} value @returns {number[]} */
function shapeOf(value) {
  if (
    !Array.isArray(value) ||
    value.length > limits.NDIM ||
    !value.every((extent) => typeof extent === "number" && extent >= 0 && extent <= limits.DIM)
  ) {
    return malformed("a shape isn't a list of extents in range");
  }
  return /** @type {number[]} */ (value);
}

const INTEGER_KINDS = /** @type {const} */ ([
  "uint8",
  "uint16",
  "uint32",
  "uint64",
  "int8",
  "int16",
  "int32",
  "int64",
]);

/**
 * Return the kind in which the entries of a sequence must be packed.
 *
 * @param {Value[]} entries at least one
 * @returns {string | null} null if they have no such kind
 */
function packedKind(entries) {
  const first = entries[0];
  if (typeof first === "boolean") {
    return entries.every((entry) => typeof entry === "boolean") ? "bool" : null;
  }
  if (typeof first === "string") {
    return entries.every((entry) => typeof entry === "string") ? "str" : null;
  }
  if (isInteger(first)) return entries.every(isInteger) ? integerKind(entries) : null;
  const isFloat = (/** @type {Value} */ entry) => Array.isArray(entry) && entry[0] === "f";
  return entries.every(isFloat) ? "float64" : null;
}

/** @param {ArrayLike<number | bigint>} integers @returns {string | null} */
function integerKind(integers) {
  let least = BigInt(integers[0]);
  let most = least;
  for (let at = 1; at < integers.length; at += 1) {
    const integer = integers[at];
    if (integer < least) least = BigInt(integer);
    if (integer > most) most = BigInt(integer);
  }
  const isNegative = least < 0n;
  for (const kind of INTEGER_KINDS.slice(isNegative ? 4 : 0, isNegative ? 8 : 4)) {
    const bits = BigInt(kind.replace(/\D/g, ""));
    const end = 1n << (isNegative ? bits - 1n : bits);
    if (most < end && (!isNegative || least >= -end)) return kind;
  }
  return null;
}

/**
 * Read packed entries.
 *
 * @param {Value[]} entries the kind, and its bytes or its column of strings
 * @returns {Tree[]}
 */
function unpack(entries) {
  const [kind, ...content] = entries;
  const clause = "REQ-TRE-011";
  /** @type {Tree[]} */
  let items;
  if (kind === "str") {
    try {
      items = parseStrings(content);
    } catch (error) {
      if (!(error instanceof CkptError)) throw error;
      return malformed(error.detail, clause);
    }
  } else {
    const bytes = content[0];
    if (content.length !== 1 || !(bytes instanceof Uint8Array)) {
      return malformed("packed entries aren't one byte string", clause);
    }
    if (kind === "bool") {
      if (bytes.some((byte) => byte > 1)) malformed("a boolean isn't 0 or 1", clause);
      items = Array.from(bytes, (byte) => byte === 1);
    } else if (kind === "float64") {
      if (bytes.length % 8) malformed("packed entries aren't whole", clause);
      items = Array.from({ length: bytes.length / 8 }, (_, at) => ({
        kind: "float",
        bytes: bytes.subarray(8 * at, 8 * at + 8),
      }));
    } else {
      if (!INTEGER_KINDS.includes(/** @type {any} */ (kind))) {
        return malformed("packed entries have an unknown kind", clause);
      }
      const name = /** @type {string} */ (kind);
      const width = /** @type {import("./dtypes.js").Dtype} */ (DTYPES.get(name)).nbytes;
      if (bytes.length % width) malformed("packed entries aren't whole", clause);
      const integers = toElements(name, bytes.slice());
      if (integers.length > 0 && integerKind(integers) !== name) {
        malformed("packed integers have another kind than the first that holds them", clause);
      }
      items = Array.from(/** @type {ArrayLike<number | bigint>} */ (integers), (integer) =>
        integer >= Number.MIN_SAFE_INTEGER && integer <= Number.MAX_SAFE_INTEGER
          ? Number(integer)
          : integer,
      );
    }
  }
  if (items.length < limits.COMPACT_ITEMS) malformed("too few entries to be packed", "REQ-TRE-010");
  return items;
}

/**
 * Read entries that stand one by one.
 *
 * @param {Value[]} entries
 * @returns {Tree[]}
 */
function readItems(entries) {
  if (entries.length >= limits.COMPACT_ITEMS && packedKind(entries) !== null) {
    malformed("entries that must be packed stand one by one", "REQ-TRE-010");
  }
  return entries.map(readTree);
}

/** @param {Value} value @param {number} count @returns {number | bigint | null} */
function maxlenOf(value, count) {
  if (value !== null && (!isInteger(value) || value < count || value >= 2n ** 63n)) {
    return malformed("the maxlen of a deque is out of range");
  }
  return value;
}

/** @param {Value} value @returns {Tree} */
function readTree(value) {
  if (value instanceof Map) return malformed("a tree holds a map");
  if (!Array.isArray(value)) return value;
  const [tag, ...entries] = value;
  const arity = (/** @type {number} */ count) => {
    if (entries.length !== count) malformed("a value has too few or too many entries");
  };
  switch (tag) {
    case "f":
    case "c":
      arity(1);
      return tag === "f"
        ? { kind: "float", bytes: bytesOf(entries[0], 8) }
        : { kind: "complex", bytes: bytesOf(entries[0], 16) };
    case "i":
      return (arity(1), readInteger(bytesOf(entries[0], -1)));
    case "l":
    case "t":
      return { kind: tag === "l" ? "list" : "tuple", items: readItems(entries) };
    case "L":
    case "U":
      return { kind: tag === "L" ? "list" : "tuple", items: unpack(entries) };
    case "q":
    case "Q": {
      if (entries.length === 0) malformed("a deque has no maxlen");
      const items = tag === "q" ? readItems(entries.slice(1)) : unpack(entries.slice(1));
      return { kind: "deque", items, maxlen: maxlenOf(entries[0], items.length) };
    }
    case "d":
      return { kind: "dict", entries: readPairs(entries) };
    case "O":
      return { kind: "ordered_dict", entries: readPairs(entries) };
    case "C":
      return { kind: "counter", entries: readPairs(entries) };
    case "s":
    case "z":
      return { kind: tag === "s" ? "set" : "frozenset", items: readMembers(entries) };
    case "a": {
      arity(3);
      const dtype = dtypeName(entries[0]);
      const shape = shapeOf(entries[1]);
      const width = /** @type {import("./dtypes.js").Dtype} */ (DTYPES.get(dtype)).nbytes;
      const nbytes = shape.reduce((product, extent) => product * BigInt(extent), BigInt(width));
      const bytes = bytesOf(entries[2], -1);
      if (BigInt(bytes.length) !== nbytes) malformed("an array has other bytes than it needs");
      return { kind: "array", dtype, shape, bytes };
    }
    case "n": {
      arity(2);
      const dtype = dtypeName(entries[0]);
      const width = /** @type {import("./dtypes.js").Dtype} */ (DTYPES.get(dtype)).nbytes;
      return { kind: "scalar", dtype, bytes: bytesOf(entries[1], width) };
    }
    case "T": {
      arity(2);
      const library = entries[1];
      if (library !== "torch" && library !== "numpy") return malformed("a tensor of no library");
      return { kind: "tensor", name: stringOf(entries[0]), library };
    }
    case "D":
      return (arity(1), { kind: "dtype", name: dtypeName(entries[0]) });
    case "V":
      return (arity(1), { kind: "device", name: stringOf(entries[0]) });
    case "S":
      return (arity(1), { kind: "size", extents: shapeOf(entries[0]) });
    default:
      return malformed("a value has no tag, or an unknown one");
  }
}

/** @param {Uint8Array} bytes two's complement, little-endian @returns {bigint} */
function readInteger(bytes) {
  let integer = 0n;
  for (let at = bytes.length - 1; at >= 0; at -= 1) integer = (integer << 8n) | BigInt(bytes[at]);
  const last = bytes[bytes.length - 1];
  if (last & 128) integer -= 1n << BigInt(8 * bytes.length);
  const before = bytes[bytes.length - 2];
  const isLonger =
    bytes.length > 1 && ((last === 0 && !(before & 128)) || (last === 255 && (before & 128) !== 0));
  if (isLonger || (integer >= -(2n ** 63n) && integer < 2n ** 64n)) {
    malformed("an integer has another form than the shortest");
  }
  return integer;
}

/**
 * Whether a value may be the key of a dict, or with `more` a member of a set.
 *
 * @param {Value} value @param {boolean} [more]
 * @returns {boolean}
 */
function isKey(value, more = false) {
  if (value instanceof Map) return false;
  if (!Array.isArray(value)) return true;
  const tag = value[0];
  if (tag === "f" || tag === "c" || tag === "i" || tag === "U") return true;
  if (more && (tag === "n" || tag === "D" || tag === "V" || tag === "S")) return true;
  return (
    (tag === "t" || tag === "z") &&
    value.slice(1).every((/** @type {Value} */ entry) => isKey(entry, more))
  );
}

/** @param {Value[]} entries @returns {[Tree, Tree][]} */
function readPairs(entries) {
  if (entries.length % 2) malformed("a dict has a key without a value");
  /** @type {[Tree, Tree][]} */
  const pairs = [];
  const seen = new Set();
  for (let at = 0; at < entries.length; at += 2) {
    if (!isKey(entries[at])) malformed("a value can't be a key", "REQ-TRE-008");
    const key = readTree(entries[at]);
    const identity = identityOf(key);
    if (seen.has(identity)) refuse("DOC_DUPLICATE_KEY", "REQ-TRE-002", "a dict has one key twice");
    seen.add(identity);
    pairs.push([key, readTree(entries[at + 1])]);
  }
  return pairs;
}

/** @param {Value[]} entries @returns {Tree[]} */
function readMembers(entries) {
  /** @type {Tree[]} */
  const items = [];
  const seen = new Set();
  let before = null;
  for (const entry of entries) {
    if (!isKey(entry, true)) malformed("a value can't be a member of a set", "REQ-TRE-009");
    const item = readTree(entry);
    const raw = dumpMsgpack(entry);
    if (before !== null && compareBytes(before, raw) >= 0) {
      malformed("the members of a set aren't sorted", "REQ-TRE-005");
    }
    before = raw;
    const identity = identityOf(item);
    if (seen.has(identity)) malformed("two members of a set are equal", "REQ-TRE-005");
    seen.add(identity);
    items.push(item);
  }
  return items;
}

/** @param {number} number @param {string} bits what tells one NaN from another */
function numberIdentity(number, bits) {
  if (Number.isNaN(number)) return `nan:${bits}`;
  return Number.isInteger(number) ? `number:${BigInt(number)}` : `number:${number}`;
}

/** @param {number} real @param {number} imaginary @param {string} bits */
function complexIdentity(real, imaginary, bits) {
  if (imaginary === 0) return numberIdentity(real, bits);
  if (Number.isNaN(real) || Number.isNaN(imaginary)) return `nan:${bits}`;
  return `complex:${real + 0}:${imaginary}`;
}

/**
 * Return a text that two values share exactly if they are equal: numbers are compared by value.
 *
 * @param {Tree} value
 * @returns {string}
 */
function identityOf(value) {
  if (value === null) return "none";
  if (typeof value === "boolean") return `number:${Number(value)}`;
  if (isInteger(/** @type {any} */ (value))) return `number:${value}`;
  if (typeof value === "string") return `text:${value.length}:${value}`;
  if (value instanceof Uint8Array) return `bytes:${toHex(value)}`;
  const node =
    /** @type {Exclude<Tree, null | boolean | number | bigint | string | Uint8Array>} */ (value);
  switch (node.kind) {
    case "float":
      return numberIdentity(float64(node.bytes, 0), toHex(node.bytes));
    case "complex":
      return complexIdentity(float64(node.bytes, 0), float64(node.bytes, 8), toHex(node.bytes));
    case "tuple":
      return `tuple:(${node.items.map(identityOf).join(",")})`;
    case "size":
      return `tuple:(${node.extents.map(identityOf).join(",")})`;
    case "frozenset":
      return `set:(${node.items.map(identityOf).sort().join(",")})`;
    case "scalar": {
      const bits = `${node.dtype}:${toHex(node.bytes)}`;
      const elements = toElements(node.dtype, node.bytes.slice());
      if (node.dtype === "float4_e2m1fn_x2") return `packed:${bits}`;
      if (/^u?int/.test(node.dtype) || node.dtype === "bool") return `number:${elements[0]}`;
      const numbers =
        node.dtype === "float64" || node.dtype === "complex128"
          ? elements
          : toFloat32(node.dtype, elements);
      return numbers.length === 2
        ? complexIdentity(Number(numbers[0]), Number(numbers[1]), bits)
        : numberIdentity(Number(numbers[0]), bits);
    }
    case "dtype":
    case "device":
      return `${node.kind}:${node.name.length}:${node.name}`;
    default:
      return malformed("a value can't be compared");
  }
}

/** @param {Uint8Array} bytes @param {number} at */
const float64 = (bytes, at) => new DataView(bytes.buffer, bytes.byteOffset).getFloat64(at, true);

/**
 * Return the canonical msgpack of a value without maps.
 *
 * @param {Value} value
 * @returns {Uint8Array}
 */
function dumpMsgpack(value) {
  /** @type {number[]} */
  const out = [];
  const big = (/** @type {number | bigint} */ number, /** @type {number} */ width) => {
    const bits = BigInt.asUintN(64, BigInt(number));
    for (let k = width - 1; k >= 0; k -= 1) out.push(Number((bits >> BigInt(8 * k)) & 255n));
  };
  const head = (
    /** @type {number} */ count,
    /** @type {number} */ short,
    /** @type {number} */ most,
    /** @type {number[]} */ tags,
  ) => {
    const widths = tags.length === 3 ? [1, 2, 4] : [2, 4];
    if (count <= most) out.push(short | count);
    else {
      const at = widths.findIndex((width) => count < 2 ** (8 * width));
      out.push(tags[at]);
      big(count, widths[at]);
    }
  };
  const write = (/** @type {Value} */ entry) => {
    if (entry === null) out.push(0xc0);
    else if (typeof entry === "boolean") out.push(entry ? 0xc3 : 0xc2);
    else if (typeof entry === "string") {
      const raw = utf8(entry);
      head(raw.length, 0xa0, 31, [0xd9, 0xda, 0xdb]);
      for (const byte of raw) out.push(byte);
    } else if (entry instanceof Uint8Array) {
      head(entry.length, 0, -1, [0xc4, 0xc5, 0xc6]);
      for (const byte of entry) out.push(byte);
    } else if (Array.isArray(entry)) {
      head(entry.length, 0x90, 15, [0xdc, 0xdd]);
      entry.forEach(write);
    } else if (isInteger(entry)) {
      if (entry >= 0 && entry < 128) out.push(Number(entry));
      else if (entry < 0 && entry >= -32) out.push(Number(entry) + 256);
      else {
        const widths = [1, 2, 4, 8];
        const at = widths.findIndex((width) => {
          const end = 2n ** BigInt(8 * width - (entry < 0 ? 1 : 0));
          return entry < 0 ? entry >= -end : entry < end;
        });
        out.push((entry < 0 ? 0xd0 : 0xcc) + at);
        big(entry, widths[at]);
      }
    }
  };
  write(value);
  return Uint8Array.from(out);
}

/**
 * Return the entries of a dict.
 *
 * @param {Tree} tree
 * @returns {[Tree, Tree][] | null} null for any other value
 */
export function dictEntries(tree) {
  return tree !== null &&
    typeof tree === "object" &&
    !(tree instanceof Uint8Array) &&
    tree.kind === "dict"
    ? tree.entries
    : null;
}

/**
 * Parse a tree.
 *
 * @param {Uint8Array} bytes
 * @returns {Tree}
 */
export function parseTree(bytes) {
  if (bytes.length > limits.TREE_NBYTES) {
    refuse("LIMIT_EXCEEDED", "REQ-TRE-007", "a tree has too many bytes");
  }
  return readTree(parseMsgpack(bytes, { items: limits.TREE_ITEMS }));
}

/**
 * Count the values of a tree, as far as it can be read.
 *
 * @param {Uint8Array} bytes @param {number} most where to stop
 * @returns {number}
 */
export function countTreeItems(bytes, most) {
  try {
    return scanMsgpack(bytes, { items: most }).items;
  } catch (error) {
    if (!(error instanceof CkptError)) throw error;
    return error.code === "LIMIT_EXCEEDED" ? most + 1 : 0;
  }
}

/**
 * List the names of all tensors that a tree refers to.
 *
 * @param {Tree} tree
 * @returns {string[]}
 */
export function tensorNames(tree) {
  /** @type {string[]} */
  const names = [];
  const visit = (/** @type {Tree} */ value) => {
    if (value === null || typeof value !== "object" || value instanceof Uint8Array) return;
    if (value.kind === "tensor") names.push(value.name);
    else if ("items" in value) value.items.forEach(visit);
    else if ("entries" in value) value.entries.forEach((pair) => pair.forEach(visit));
  };
  visit(tree);
  return names;
}

/** A complex number of a leaf. @typedef {{real: number, imaginary: number}} Complex */

/**
 * Return a tree as plain values of JavaScript, for programs and for display.
 *
 * Lists, tuples and deques become arrays, sets become `Set`s, dicts become objects if all keys are
 * strings and `Map`s otherwise, arrays become `{dtype, shape, data}`, tensors `{tensor: name}`.
 * Floats and integers both become numbers, and integers beyond 2^53 BigInt.
 *
 * @param {Tree} tree
 * @returns {any}
 */
export function toPlain(tree) {
  if (tree === null || typeof tree !== "object" || tree instanceof Uint8Array) return tree;
  switch (tree.kind) {
    case "float":
      return float64(tree.bytes, 0);
    case "complex":
      return { real: float64(tree.bytes, 0), imaginary: float64(tree.bytes, 8) };
    case "list":
    case "tuple":
    case "deque":
      return tree.items.map(toPlain);
    case "set":
    case "frozenset":
      return new Set(tree.items.map(toPlain));
    case "dict":
    case "ordered_dict":
    case "counter": {
      const entries = tree.entries.map(([key, value]) => [toPlain(key), toPlain(value)]);
      return entries.every(([key]) => typeof key === "string")
        ? Object.fromEntries(entries)
        : new Map(/** @type {[any, any][]} */ (entries));
    }
    case "array":
      return {
        dtype: tree.dtype,
        shape: tree.shape,
        data: toElements(tree.dtype, tree.bytes.slice()),
      };
    case "scalar": {
      const [first] = toElements(tree.dtype, tree.bytes.slice());
      if (tree.dtype === "bool") return first === 1;
      if (/^float16|^bfloat16/.test(tree.dtype)) {
        return (tree.dtype === "float16" ? fromFloat16 : fromBfloat16)(Number(first));
      }
      if (/^complex|^float[48]/.test(tree.dtype)) {
        const numbers = toFloat32(tree.dtype, toElements(tree.dtype, tree.bytes.slice()));
        return numbers.length === 2 ? { real: numbers[0], imaginary: numbers[1] } : numbers[0];
      }
      return first;
    }
    case "tensor":
      return { tensor: tree.name };
    case "size":
      return tree.extents;
    default:
      return tree.name;
  }
}

/**
 * Return a tree as tagged JSON, which keeps every type: the form of the conformance suite.
 *
 * @param {Tree} tree
 * @returns {any}
 */
export function toTagged(tree) {
  if (typeof tree === "bigint") return { int: String(tree) };
  if (tree === null || typeof tree !== "object") return tree;
  if (tree instanceof Uint8Array) return { bytes: toHex(tree) };
  const high = (/** @type {Uint8Array} */ bytes) => toHex(bytes.slice().reverse());
  switch (tree.kind) {
    case "float":
      return { float: high(tree.bytes) };
    case "complex":
      return { complex: [high(tree.bytes.subarray(0, 8)), high(tree.bytes.subarray(8))] };
    case "deque":
      return { deque: tree.items.map(toTagged), maxlen: tree.maxlen };
    case "list":
    case "tuple":
    case "set":
    case "frozenset":
      return { [tree.kind]: tree.items.map(toTagged) };
    case "dict":
    case "ordered_dict":
    case "counter":
      return { [tree.kind]: tree.entries.map((pair) => pair.map(toTagged)) };
    case "array":
      return { array: toHex(tree.bytes), dtype: tree.dtype, shape: tree.shape };
    case "scalar":
      return { scalar: toHex(tree.bytes), dtype: tree.dtype };
    case "tensor":
      return { tensor: tree.name, kind: tree.library };
    case "size":
      return { size: tree.extents };
    default:
      return { [tree.kind]: tree.name };
  }
}
