// @ts-check
/** References to tensors of a frozen base (page 46). @module */
import { exactProduct } from "./boxes.js";
import { DTYPES } from "./dtypes.js";
import { refuse } from "./errors.js";
import * as limits from "./limits.js";
import { compareText, digestText, utf8Length } from "./text.js";
import { dictEntries } from "./tree.js";

/**
 * A tensor of the field `weights` that a checkpoint refers to instead of storing it.
 *
 * @typedef {object} FrozenTensor
 * @property {string} name
 * @property {string[]} aliases
 * @property {string} dtype
 * @property {number[]} shape
 * @property {string} nameInBase
 * @property {string} digest of the whole content
 */

/** @param {string} clause @param {string} detail @returns {never} */
const malformed = (clause, detail) => refuse("FROZEN_FORM", clause, detail);

/** @param {import("./tree.js").Tree} tree @param {string[]} names @param {string} clause */
function membersOf(tree, names, clause) {
  const entries = dictEntries(tree);
  if (entries === null) return malformed(clause, "the leaf isn't a dict");
  const keys = entries.map(([key]) => key);
  if (keys.length !== names.length || !names.every((name) => keys.includes(name))) {
    malformed(clause, `the leaf hasn't exactly the members ${names.join(", ")}`);
  }
  return /** @type {Record<string, import("./tree.js").Tree>} */ (Object.fromEntries(entries));
}

/** @param {unknown} text @param {string} clause @param {number} [least] @returns {string} */
function nameOf(text, clause, least = 0) {
  if (typeof text !== "string") return malformed(clause, "a name isn't a string");
  const nbytes = utf8Length(text);
  if (nbytes < least || nbytes > limits.NAME_NBYTES) malformed(clause, "a name is too long");
  return text;
}

/** @param {import("./tree.js").Tree} tree @returns {import("./tree.js").Tree[]} */
const listOf = (tree) =>
  tree !== null && typeof tree === "object" && "items" in tree && tree.kind === "list"
    ? tree.items
    : malformed("REQ-FRZ-003", "a member isn't a list");

/**
 * Read the leaf `~frozen`.
 *
 * @param {import("./tree.js").Tree} tree
 * @returns {string} path or URL of the base at the time of the save; never opened by this package
 */
export function readLocation(tree) {
  const clause = "REQ-FRZ-002";
  const { kind, location } = membersOf(tree, ["kind", "location"], clause);
  if (kind !== "ckptfmt.frozen_base") malformed(clause, "the leaf is of another kind");
  return nameOf(location, clause, 1);
}

/**
 * Read the leaf of a reference.
 *
 * @param {string} leafName @param {import("./tree.js").Tree} tree
 * @returns {FrozenTensor}
 */
export function readFrozen(leafName, tree) {
  const clause = "REQ-FRZ-003";
  const members = membersOf(tree, ["aliases", "digest", "dtype", "name_in_base", "shape"], clause);
  const name = nameOf(leafName.slice("~frozen/".length), clause);
  const aliases = listOf(members.aliases).map((alias) => nameOf(alias, clause));
  if (aliases.some((alias, at) => at > 0 && compareText(aliases[at - 1], alias) >= 0)) {
    malformed(clause, "aliases aren't sorted, or one is there twice");
  }
  if (!(members.digest instanceof Uint8Array) || members.digest.length !== 32) {
    return malformed(clause, "digest isn't 32 bytes");
  }
  if (typeof members.dtype !== "string" || !DTYPES.has(members.dtype)) {
    return malformed(clause, "the dtype is unknown");
  }
  const shape = listOf(members.shape);
  if (
    shape.length > limits.NDIM ||
    !shape.every((extent) => typeof extent === "number" && extent >= 0 && extent <= limits.DIM) ||
    exactProduct(/** @type {number[]} */ (shape).filter((extent) => extent > 0)) > limits.ELEMENTS
  ) {
    malformed(clause, "the shape is out of range");
  }
  return {
    name,
    aliases,
    dtype: members.dtype,
    shape: /** @type {number[]} */ (shape),
    nameInBase: nameOf(members.name_in_base, clause),
    digest: digestText(members.digest),
  };
}
