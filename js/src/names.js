// @ts-check
/** Names of files, checkpoints, features and fields (pages 20, 30, 40, 95). @module */

export const FORMAT_VERSION = "1.0";
/** Earlier versions of the format that this package reads: documents of 0.10 have the form of 1.0. */
export const EARLIER_VERSIONS = ["0.10"];

const MINOR_VERSION = /^1\.(0|[1-9][0-9]{0,8})$/;

/** @param {string} version @returns {boolean} whether this package reads the version (REQ-VER-001) */
export const isKnownVersion = (version) =>
  EARLIER_VERSIONS.includes(version) || MINOR_VERSION.test(version);

/**
 * Return whether a document may have members that this package ignores (REQ-VER-011).
 *
 * @param {unknown} version
 */
export const isLaterVersion = (version) =>
  typeof version === "string" &&
  MINOR_VERSION.test(version) &&
  Number(version.slice(2)) > Number(FORMAT_VERSION.slice(2));

/** The seven fields, in the order of their numbers in columns. */
export const FIELDS = /** @type {const} */ ([
  "weights",
  "optimizer",
  "rng",
  "data",
  "config",
  "topology",
  "provenance",
]);

/** @typedef {typeof FIELDS[number]} Field */

/** The encodings in the order of the registry of page 45. */
export const ENCODINGS = [
  "raw",
  "same",
  "planes",
  "xor",
  "difference",
  "sparse",
  "classes",
  "gradient",
];
/** Features that a full checkpoint may have. */
export const FULL_FEATURES = new Set(["caches", "frozen", "labels", "suspect"]);
/** The reader features of manifests and parts that this package implements. */
export const READER_FEATURES = new Set([
  "deltas",
  ...ENCODINGS.slice(2),
  "adam",
  "cast",
  "sgd",
  ...FULL_FEATURES,
]);

const PREDICTION = new Set(["gradient", "adam", "cast", "sgd"]);

/**
 * Return the profiles of the specification that a reader of a checkpoint implements (page 01).
 *
 * @param {string[]} features the reader features of the manifest
 */
export function readerProfiles(features) {
  const profileOf = (/** @type {string} */ name) =>
    FULL_FEATURES.has(name) ? name : PREDICTION.has(name) ? "prediction" : "R-delta";
  return ["R-core", ...new Set(features.map(profileOf).sort())];
}

/** An integer of a name, whatever its size. @typedef {number | bigint} Integer */

/** @param {string} digits @returns {Integer} */
export function toInteger(digits) {
  const number = Number(digits);
  return Number.isSafeInteger(number) ? number : BigInt(digits);
}

const CHECKPOINT = /^step-([0-9]{8}|[1-9][0-9]{8,})-l([0-9]{4}|[1-9][0-9]{4,})$/;

/**
 * Parse the name of a checkpoint in a run.
 *
 * @param {string} name
 * @returns {{step: Integer, launch: Integer} | null} null for a name of another form
 */
export function parseCheckpointName(name) {
  const found = CHECKPOINT.exec(name);
  return found && { step: toInteger(found[1]), launch: toInteger(found[2]) };
}

/**
 * Parse the name of a record of a launch, such as `0003.json`.
 *
 * @param {string} name
 * @returns {Integer | null} the number, or null for a name of another form
 */
export function parseRecordName(name) {
  const found = /^([0-9]{4}|[1-9][0-9]{4,})\.json$/.exec(name);
  return found && toInteger(found[1]);
}

/** @param {number} writer @returns {string} its number as it stands in names of files */
export const writerText = (writer) => String(writer).padStart(5, "0");

/** @param {string} attempt @param {number} writer */
export const partPath = (attempt, writer) => `parts/${attempt}-${writerText(writer)}.msgpack`;

const SHARD = /^[a-z][a-z_]{0,40}-([0-9a-f]{16})-([0-9]{5}|[1-9][0-9]{5,})\.(safetensors|pack)$/;

/**
 * Whether the name of a shard or pack has the form of page 30.
 *
 * @param {string} name @param {string} attempt @param {number} writer
 */
export function isShardName(name, attempt, writer) {
  const found = SHARD.exec(name);
  return found !== null && found[1] === attempt && found[2] === writerText(writer);
}

/** Join a path and a name; a path may be empty. @param {string} path @param {string} name */
export const join = (path, name) => (path === "" ? name : `${path}/${name}`);

/** Return the path of the folder around a path, or null for the root. @param {string} path */
export function parentOf(path) {
  if (path === "") return null;
  const at = path.lastIndexOf("/");
  return at < 0 ? "" : path.slice(0, at);
}

/** Return the last component of a path. @param {string} path */
export const baseName = (path) => path.slice(path.lastIndexOf("/") + 1);
