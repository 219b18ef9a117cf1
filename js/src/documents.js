// @ts-check
/** JSON documents: the register, and the records of a run (pages 10, 20, 30, 65, 70). @module */
import { blake3 } from "./blake3.js";
import { CkptError, refuse } from "./errors.js";
import { canonicalJson, jsonDepth, parseJson, refusing } from "./json.js";
import * as limits from "./limits.js";
import {
  FIELDS,
  EARLIER_VERSIONS,
  FULL_FEATURES,
  READER_FEATURES,
  isKnownVersion,
  parseCheckpointName,
  parseRecordName,
} from "./names.js";
import { SCHEMAS } from "./schema.js";
import { compareText, digestText, equalBytes, fromUtf8, utf8, utf8Length } from "./text.js";

/** @typedef {{reader: string[], writer: string[]}} Features */
/** @typedef {{name: string, digest: string}} Reference */
/**
 * The summary of a field in a manifest.
 *
 * @typedef {{state: "present", tensor_count: number, nbytes: number, stream_count: number,
 *   leaf_count: number, stored_nbytes?: number} | {state: "absent", reason: string}} FieldSummary
 */
/**
 * The content of a manifest (page 30).
 *
 * @typedef {object} Manifest
 * @property {"manifest"} type
 * @property {string} format_version
 * @property {Features} features
 * @property {string | null} run_id
 * @property {number | null} launch
 * @property {string} nonce
 * @property {number} step
 * @property {string} attempt
 * @property {number} writer_count
 * @property {number} block_nbytes
 * @property {number} saved_unix_s
 * @property {"full" | "delta"} profile
 * @property {Reference[]} references
 * @property {Record<string, string>} [metrics]
 * @property {string[]} [tags]
 * @property {string} [suspect]
 * @property {"node" | "peers"} [durability]
 * @property {Record<import("./names.js").Field, FieldSummary>} fields
 * @property {{name: string, nbytes: number, digest: string}} index
 */
/**
 * @typedef {object} Tombstone
 * @property {"tombstone"} type
 * @property {string | null} run_id
 * @property {number | null} launch
 * @property {number} step
 * @property {string} manifest_digest
 */
/**
 * @typedef {object} AbortRecord
 * @property {"abort"} type
 * @property {string | null} run_id
 * @property {number | null} launch
 * @property {number} step
 * @property {string} reason
 */
/**
 * The record of a launch (page 20).
 *
 * @typedef {object} LaunchRecord
 * @property {"launch"} type
 * @property {string} run_id
 * @property {number} launch
 * @property {string} nonce
 * @property {"lineage" | "fallback" | "hand"} chosen_by
 * @property {Reference | null} resume_from
 */
/**
 * A record of labels (page 20).
 *
 * @typedef {object} LabelsRecord
 * @property {string} run_id
 * @property {string} checkpoint
 * @property {number} number
 * @property {boolean} pinned
 * @property {Record<string, string>} metrics
 * @property {string[]} tags
 */

/** Characters that could forge a line or a name, and halves of surrogate pairs. */
const FORBIDDEN = new RegExp(
  "[\\u0000-\\u001f\\u007f-\\u009f\\u061c\\u200e\\u200f\\u202a-\\u202e\\u2066-\\u2069]" +
    "|[\\ud800-\\udbff](?![\\udc00-\\udfff])|(?<![\\ud800-\\udbff])[\\udc00-\\udfff]",
);

/** Whether a string may stand in a JSON document (REQ-DOC-006). @param {string} text */
export const isDocumentString = (text) =>
  !FORBIDDEN.test(text) &&
  utf8Length(text) <= limits.JSON_STRING_NBYTES &&
  text.normalize("NFC") === text;

/** @param {import("./json.js").Json} value */
function checkStrings(value) {
  if (typeof value === "string") {
    if (!isDocumentString(value)) {
      refuse(
        "DOC_STRING",
        "REQ-DOC-006",
        "a string is too long, not normalised, or has a " + "forbidden character",
      );
    }
  } else if (Array.isArray(value)) value.forEach(checkStrings);
  else if (value !== null && typeof value === "object") {
    for (const [key, member] of Object.entries(value)) {
      checkStrings(key);
      checkStrings(member);
    }
  }
}

const FEATURE = /^[a-z][a-z0-9._-]{0,63}$/;

/**
 * Check version and features, which come before all other members (REQ-DOC-010).
 *
 * @param {any} signed @param {boolean} hasFeatures whether features are known in this document
 */
export function checkHead(signed, hasFeatures) {
  const version = signed.format_version;
  if (typeof version !== "string") {
    refuse("DOC_SCHEMA", "REQ-VER-001", "format_version is missing or isn't a string");
  }
  if (!isKnownVersion(version)) {
    refuse(
      "VERSION_UNSUPPORTED",
      "REQ-DOC-010",
      `the document has version ${version} of the format, and this package reads 1.x and ` +
        EARLIER_VERSIONS.join(),
    );
  }
  const features = signed.features;
  if (
    features === null ||
    typeof features !== "object" ||
    Array.isArray(features) ||
    Object.keys(features).sort().join() !== "reader,writer"
  ) {
    refuse("DOC_SCHEMA", "REQ-VER-002", "features isn't an object of reader and writer");
  }
  for (const list of [features.reader, features.writer]) {
    if (
      !Array.isArray(list) ||
      list.length > 64 ||
      new Set(list).size !== list.length ||
      !list.every((name) => typeof name === "string" && FEATURE.test(name))
    ) {
      refuse("DOC_SCHEMA", "REQ-VER-008", "a list of features is malformed");
    }
  }
  for (const name of features.reader) {
    if (!hasFeatures || !READER_FEATURES.has(name)) {
      refuse(
        "FEATURE_UNSUPPORTED",
        "REQ-DOC-010",
        `the document needs the feature ${name}, which is unknown here`,
      );
    }
  }
}

/**
 * Parse a JSON document, up to and with its schema.
 *
 * @param {Uint8Array} bytes
 * @param {string[]} types the types that are allowed in this place
 * @returns {{signed: any, digest: string}}
 */
export function parseDocument(bytes, types) {
  const most = types.includes("manifest") ? limits.MANIFEST_NBYTES : limits.JSON_NBYTES;
  if (bytes.length > most) {
    refuse("LIMIT_EXCEEDED", "REQ-DOC-008", `the document has more than ${most} bytes`);
  }
  if (jsonDepth(bytes) > limits.JSON_DEPTH) {
    refuse("DOC_DEPTH", "REQ-DOC-007", "the document nests too deeply");
  }
  const text = fromUtf8(bytes);
  if (text === null || text.startsWith("\ufeff")) {
    return refuse("DOC_ENCODING", "REQ-DOC-002", "the document isn't UTF-8, or has a mark");
  }
  const syntax = refusing("DOC_SYNTAX", "REQ-DOC-003", "the document isn't one JSON object");
  const parsed = parseJson(text, {
    syntax,
    duplicate: (key) => refuse("DOC_DUPLICATE_KEY", "REQ-DOC-004", `the key ${key} is there twice`),
    number: (spelling) => {
      const number = Number(spelling);
      if (!/^-?[0-9]+$/.test(spelling) || spelling === "-0" || !Number.isSafeInteger(number)) {
        refuse("DOC_NUMBER", "REQ-DOC-005", `${spelling.slice(0, 40)} isn't an integer in range`);
      }
      return number;
    },
  });
  if (parsed === null || typeof parsed !== "object" || Array.isArray(parsed)) return syntax();
  checkStrings(parsed);
  const { digest, signed } = /** @type {any} */ (parsed);
  if (
    Object.keys(parsed).sort().join() !== "digest,signed" ||
    typeof digest !== "string" ||
    signed === null ||
    typeof signed !== "object" ||
    Array.isArray(signed)
  ) {
    return refuse("DOC_SCHEMA", "REQ-DOC-011", "the document isn't an object of digest and signed");
  }
  if (!equalBytes(utf8(canonicalJson(parsed)), bytes)) {
    refuse("DOC_NOT_CANONICAL", "REQ-DOC-001", "the document isn't in canonical form");
  }
  if (digestText(blake3(utf8(canonicalJson(signed)))) !== digest) {
    refuse("DOC_DIGEST", "REQ-DOC-009", "the content of the document doesn't have its digest");
  }
  checkHead(signed, signed.type === "manifest" && types.includes("manifest"));
  if (!types.includes(signed.type)) {
    refuse("DOC_SCHEMA", "REQ-DOC-011", `the document isn't of the type ${types.join(" or ")}`);
  }
  SCHEMAS[signed.type](signed, "");
  return { signed, digest };
}

/* ------------------------------------------------------------------------ the register ---- */

/** @param {Reference[]} references whose digests are texts */
function checkReferences(references) {
  references.forEach(({ name, digest }, at) => {
    if (parseCheckpointName(name) === null) {
      refuse("UNSAFE_PATH", "REQ-DEL-002", `${name} isn't the name of a checkpoint`);
    }
    if (at > 0 && references[at - 1].digest >= digest) {
      refuse("COLUMN_ORDER", "REQ-DEL-002", "references aren't sorted by their digests");
    }
  });
}

/** @param {any} signed */
function checkBothNull(signed) {
  if ((signed.run_id === null) !== (signed.launch === null)) {
    refuse("DOC_SCHEMA", "REQ-MAN-008", "one of run_id and launch is null, and the other isn't");
  }
}

/**
 * Check the members that go with a feature: labels, suspect, caches. Also for parts.
 *
 * @param {any} signed with `features`, `run_id` and perhaps the members
 * @param {boolean} isFirst whether the document may have labels and `suspect`
 */
export function checkFeatureMembers(signed, isFirst) {
  const features = new Set(signed.features.reader);
  const isLabelled = features.has("labels");
  if (
    "metrics" in signed !== isLabelled ||
    "tags" in signed !== isLabelled ||
    (isLabelled && Object.keys(signed.metrics).length + signed.tags.length === 0)
  ) {
    refuse("DOC_SCHEMA", "REQ-MAN-010", "metrics and tags don't go with the feature labels");
  }
  if ("suspect" in signed !== features.has("suspect")) {
    refuse("DOC_SCHEMA", "REQ-MAN-013", "suspect doesn't go with the feature suspect");
  }
  if (
    "durability" in signed !== features.has("caches") ||
    (features.has("caches") && signed.run_id === null)
  ) {
    refuse("DOC_SCHEMA", "REQ-MAN-012", "durability doesn't go with the feature caches in a run");
  }
  if (!isFirst && (isLabelled || features.has("suspect"))) {
    refuse("DOC_SCHEMA", "REQ-PRT-014", "labels or suspect stand in another part than writer 0's");
  }
}

/** @param {number} number */
export const isPowerOfTwo = (number) => Number.isInteger(Math.log2(number));

/** @param {Manifest} manifest */
function checkManifest(manifest) {
  checkBothNull(manifest);
  if (!isPowerOfTwo(manifest.block_nbytes)) {
    refuse("DOC_SCHEMA", "REQ-TEN-005", "block_nbytes isn't a power of two");
  }
  checkFeatureMembers(manifest, true);
  if (manifest.index.name !== `index-${manifest.attempt}.msgpack`) {
    refuse("UNSAFE_PATH", "REQ-CKP-001", "the index has the name of another attempt");
  }
  checkReferences(manifest.references);
  const features = manifest.features.reader;
  const isDelta = features.some((name) => !FULL_FEATURES.has(name));
  const present = FIELDS.map((name) => manifest.fields[name]).filter(
    (summary) => summary.state === "present",
  );
  if (
    (manifest.profile === "delta") !== isDelta ||
    isDelta !== features.includes("deltas") ||
    (!isDelta && manifest.references.length > 0) ||
    !present.every((summary) => "stored_nbytes" in summary === isDelta) ||
    features.some((name, at) => at > 0 && compareText(features[at - 1], name) >= 0)
  ) {
    refuse(
      "PROFILE_MISMATCH",
      "REQ-MAN-005",
      "profile, features, references and stored_nbytes contradict each other",
    );
  }
}

/**
 * Parse what a register holds.
 *
 * @param {Uint8Array} bytes
 * @returns {{content: Manifest | Tombstone | AbortRecord, digest: string}}
 */
export function parseRegister(bytes) {
  const { signed, digest } = parseDocument(bytes, ["manifest", "abort", "tombstone"]);
  if (signed.type === "manifest") checkManifest(signed);
  else checkBothNull(signed);
  return { content: signed, digest };
}

/**
 * Refuse a register that holds no manifest.
 *
 * @param {Manifest | Tombstone | AbortRecord} content
 * @returns {Manifest}
 */
export function requireManifest(content) {
  if (content.type === "abort") {
    refuse("CHECKPOINT_ABORTED", "REQ-MAN-001", `the checkpoint was given up: ${content.reason}`);
  }
  if (content.type === "tombstone") {
    refuse("CHECKPOINT_RETIRED", "REQ-MAN-001", "the checkpoint was retired");
  }
  return /** @type {Manifest} */ (content);
}

/* ---------------------------------------------------------------------- records of a run ---- */

/** @param {Uint8Array} bytes @returns {{run_id: string, features: Features}} */
export const parseRun = (bytes) => parseDocument(bytes, ["run"]).signed;

/**
 * @param {string} clause @param {boolean} isEqual @param {string} detail
 */
function sameRun(clause, isEqual, detail) {
  if (!isEqual) refuse("RUN_MISMATCH", clause, detail);
}

/**
 * Parse a record named after a launch: a launch, a vote, a ledger entry, a verdict, or a decision.
 *
 * @param {Uint8Array} bytes @param {"launch" | "vote" | "ledger" | "witness" | "healing"} type
 * @param {string} fileName
 * @param {string | null} runId the run's id, or null if no run is known
 * @returns {any}
 */
export function parseLaunchFile(bytes, type, fileName, runId) {
  const clause = {
    launch: "REQ-RUN-005",
    vote: "REQ-RUN-065",
    ledger: "REQ-RUN-043",
    witness: "REQ-RUN-060",
    healing: "REQ-RUN-063",
  }[type];
  const { signed } = parseDocument(bytes, [type]);
  sameRun(
    clause,
    parseRecordName(fileName) === signed.launch,
    `the record of launch ${signed.launch} has the name ${fileName}`,
  );
  sameRun(
    "REQ-RUN-003",
    runId === null || runId === signed.run_id,
    "the record belongs to another run",
  );
  return signed;
}

/**
 * Parse a name of a record of labels.
 *
 * @param {string} name
 * @returns {{checkpoint: string, number: number} | null}
 */
export function parseLabelsName(name) {
  const found = /^(step-.*)-([0-9]{4}|[1-9][0-9]{4,})\.json$/.exec(name);
  if (found === null || parseCheckpointName(found[1]) === null) return null;
  const number = Number(found[2]);
  return number >= 1 && Number.isSafeInteger(number) ? { checkpoint: found[1], number } : null;
}

/**
 * Parse a record of labels.
 *
 * @param {Uint8Array} bytes @param {string} fileName @param {string | null} runId
 * @returns {LabelsRecord}
 */
export function parseLabels(bytes, fileName, runId) {
  const { signed } = parseDocument(bytes, ["labels"]);
  const named = parseLabelsName(fileName);
  sameRun(
    "REQ-RUN-023",
    named !== null && named.checkpoint === signed.checkpoint && named.number === signed.number,
    `the record has the name ${fileName}`,
  );
  sameRun(
    "REQ-RUN-023",
    runId === null || runId === signed.run_id,
    "the record belongs to another run",
  );
  return signed;
}

/**
 * Parse a failure record, or the pins of a writer.
 *
 * @param {Uint8Array} bytes @param {"failure" | "pins"} type
 * @param {string | null} fileName
 * @returns {any}
 */
export function parseWriterFile(bytes, type, fileName) {
  const { signed } = parseDocument(bytes, [type]);
  if (type === "pins") checkReferences(signed.references);
  const found = fileName === null ? null : /^([0-9a-f]{16})-([0-9]{5,})\./.exec(fileName);
  if (found && (found[1] !== signed.attempt || Number(found[2]) !== signed.writer)) {
    refuse(
      "DOC_MISMATCH",
      type === "pins" ? "REQ-CMT-037" : "REQ-CMT-050",
      `the document has the name ${fileName}`,
    );
  }
  return signed;
}

export { CkptError };
