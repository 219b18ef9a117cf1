// @ts-check
/** Nodes of trees as lines of text, for the view of plain values. @module */
import { toElements } from "../../src/dtypes.js";
import { counted, firstTexts, floatText, shapeText } from "./text.js";

/** @typedef {import("../../src/tree.js").Tree} Tree */
/**
 * A line of the view.
 *
 * @typedef {object} Line
 * @property {string} kind for people, such as `int` or `dict`
 * @property {string} text
 * @property {number} count children
 */

const MOST_STRING = 2000;
const MOST_BYTES = 64;
const MOST_ELEMENTS = 16;
const OPENING = { list: "[]", tuple: "()", set: "{}", frozenset: "{}", deque: "[]" };

/** @param {Uint8Array} bytes */
const hexOf = (bytes) => Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join(" ");

/** @param {Uint8Array} bytes @param {number} at */
const float64 = (bytes, at) =>
  new DataView(bytes.buffer, bytes.byteOffset, bytes.length).getFloat64(at, true);

/**
 * Describe a node.
 *
 * @param {Tree} tree
 * @returns {Line}
 */
export function lineOf(tree) {
  if (tree === null) return { kind: "none", text: "None", count: 0 };
  if (typeof tree === "boolean") return { kind: "bool", text: tree ? "True" : "False", count: 0 };
  if (typeof tree === "number" || typeof tree === "bigint") {
    return { kind: "int", text: String(tree), count: 0 };
  }
  if (typeof tree === "string") {
    const cut = tree.length > MOST_STRING ? ` … (${counted(tree.length, "character")})` : "";
    return { kind: "str", text: JSON.stringify(tree.slice(0, MOST_STRING)) + cut, count: 0 };
  }
  if (tree instanceof Uint8Array) {
    const cut = tree.length > MOST_BYTES ? " …" : "";
    const text = `${counted(tree.length, "byte")}: ${hexOf(tree.subarray(0, MOST_BYTES))}${cut}`;
    return { kind: "bytes", text, count: 0 };
  }
  switch (tree.kind) {
    case "float":
      return { kind: "float", text: floatText(float64(tree.bytes, 0)), count: 0 };
    case "complex": {
      const [real, imaginary] = [0, 8].map((at) => floatText(float64(tree.bytes, at)));
      return { kind: "complex", text: `${real}, ${imaginary}i`, count: 0 };
    }
    case "dict":
    case "ordered_dict":
    case "counter": {
      const text =
        tree.entries.length === 0 ? "{}" : counted(tree.entries.length, "entry", "entries");
      return { kind: tree.kind, text, count: tree.entries.length };
    }
    case "array": {
      const first = elementsOf(tree.dtype, tree.bytes, MOST_ELEMENTS);
      return { kind: "array", text: `${tree.dtype} ${shapeText(tree.shape)}: ${first}`, count: 0 };
    }
    case "scalar":
      return { kind: tree.dtype, text: elementsOf(tree.dtype, tree.bytes, 1), count: 0 };
    case "tensor":
      return { kind: "tensor", text: tree.name, count: 0 };
    case "size":
      return { kind: "size", text: shapeText(tree.extents), count: 0 };
    case "dtype":
    case "device":
      return { kind: tree.kind, text: tree.name, count: 0 };
    default: {
      const { length } = tree.items;
      return {
        kind: tree.kind,
        text: length === 0 ? OPENING[tree.kind] : counted(length, "item"),
        count: length,
      };
    }
  }
}

/** @param {string} dtype @param {Uint8Array} bytes @param {number} most */
function elementsOf(dtype, bytes, most) {
  const data = toElements(dtype, bytes.slice());
  const texts = firstTexts(dtype, data, most + 1);
  return texts.length > most ? `${texts.slice(0, most).join(", ")}, …` : texts.join(", ");
}

/**
 * Return a range of a node's children, with the texts of their keys.
 *
 * @param {Tree} tree @param {number} from @param {number} to
 * @returns {{key: string, tree: Tree}[]}
 */
export function childrenOf(tree, from, to) {
  if (tree === null || typeof tree !== "object" || tree instanceof Uint8Array) return [];
  if ("entries" in tree) {
    return tree.entries.slice(from, to).map(([key, value]) => ({
      key: typeof key === "string" ? key : keyText(key),
      tree: value,
    }));
  }
  if (!("items" in tree)) return [];
  return tree.items.slice(from, to).map((item, at) => ({ key: String(from + at), tree: item }));
}

/** @param {Tree} key */
function keyText(key) {
  const { kind, text } = lineOf(key);
  if (kind !== "tuple") return text;
  return `(${childrenOf(key, 0, 9)
    .map(({ tree }) => lineOf(tree).text)
    .join(", ")})`;
}
