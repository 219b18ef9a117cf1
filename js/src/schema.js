// @ts-check
/**
 * The schemas of the JSON documents, as functions that refuse what doesn't fit.
 *
 * @module
 */
import { refuse } from "./errors.js";
import * as limits from "./limits.js";
import { FIELDS, isLaterVersion } from "./names.js";
import { compareText } from "./text.js";

/** @typedef {(value: any, place: string) => void} Check */

/** @param {string} clause @param {string} place @param {string} detail @returns {never} */
const misfit = (clause, place, detail) => refuse("DOC_SCHEMA", clause, `${place || "/"} ${detail}`);

/** @param {string} text */
const characterCount = (text) => [...text].length;

/**
 * An object with exactly these members.
 *
 * @param {string} clause @param {Record<string, Check>} members
 * @param {Record<string, Check>} [optional]
 * @returns {Check}
 */
export const object =
  (clause, members, optional = {}) =>
  (value, place) => {
    if (value === null || typeof value !== "object" || Array.isArray(value)) {
      misfit(clause, place, "isn't an object");
    }
    for (const name of Object.keys(members)) {
      if (!Object.hasOwn(value, name)) misfit(clause, `${place}/${name}`, "is missing");
    }
    // A document of a later minor version may have more members (REQ-VER-011), its objects not.
    const isOpen = place === "" && isLaterVersion(value.format_version);
    for (const name of Object.keys(value)) {
      const check = Object.hasOwn(members, name)
        ? members[name]
        : Object.hasOwn(optional, name)
          ? optional[name]
          : null;
      if (check === null) {
        if (!isOpen) misfit(clause, `${place}/${name}`, "is unknown");
      } else check(value[name], `${place}/${name}`);
    }
  };

/** @param {string} clause @param {RegExp} pattern @returns {Check} */
const pattern = (clause, pattern) => (value, place) => {
  if (typeof value !== "string" || !pattern.test(value)) misfit(clause, place, "is malformed");
};

/** @param {string} clause @param {number} least @param {number} most @returns {Check} */
export const text = (clause, least, most) => (value, place) => {
  const count = typeof value === "string" ? characterCount(value) : -1;
  if (count < least || count > most) {
    misfit(clause, place, `isn't a text of ${least} to ${most} characters`);
  }
};

/** @param {string} clause @param {number} [least] @param {number} [most] @returns {Check} */
const integer =
  (clause, least = 0, most = limits.JSON_INTEGER) =>
  (value, place) => {
    if (!Number.isInteger(value) || value < least || value > most) {
      misfit(clause, place, `isn't an integer from ${least} to ${most}`);
    }
  };

/** @param {string} clause @param {unknown[]} values @returns {Check} */
const oneOf =
  (clause, ...values) =>
  (value, place) => {
    if (!values.includes(value)) misfit(clause, place, `isn't one of ${values.join(", ")}`);
  };

/** @param {Check} check @returns {Check} */
const orNull = (check) => (value, place) => {
  if (value !== null) check(value, place);
};

/** @param {string} clause @param {Check} check @param {number} most @param {number} [least]
 *  @returns {Check} */
const array =
  (clause, check, most, least = 0) =>
  (value, place) => {
    if (!Array.isArray(value) || value.length < least || value.length > most) {
      misfit(clause, place, `isn't a list of ${least} to ${most} entries`);
    }
    value.forEach((/** @type {any} */ entry, /** @type {number} */ at) =>
      check(entry, `${place}/${at}`),
    );
  };

/** @type {Check} */
const any = () => {};

const count = integer("REQ-DOC-005");
const digest = pattern("REQ-DOC-009", /^blake3:[0-9a-f]{64}$/);
const runId = pattern("REQ-RUN-001", /^[0-9a-f]{32}$/);
const nonce = pattern("REQ-RUN-002", /^[0-9a-f]{32}$/);
const attempt = pattern("REQ-CKP-001", /^[0-9a-f]{16}$/);
const checkpointName = pattern("REQ-RUN-008", /^step-[0-9]{8,20}-l[0-9]{4,20}$/);
const exactName = pattern(
  "REQ-RUN-008",
  /^step-([0-9]{8}|[1-9][0-9]{8,19})-l([0-9]{4}|[1-9][0-9]{4,19})$/,
);
const reason = text("REQ-MAN-003", 1, 1000);
const references = array(
  "REQ-LIM-001",
  object("REQ-DEL-002", { name: checkpointName, digest }),
  limits.REFERENCES,
);

const DECIMAL = /^-?(0|[1-9][0-9]*)(\.[0-9]+)?(e[+-]?[0-9]+)?$/;
const LABELS = "REQ-MAN-011";

/**
 * Refuse metrics that aren't a map from names to finite numbers in decimal.
 *
 * @type {Check}
 */
export const metrics = (value, place) => {
  if (value === null || typeof value !== "object" || Array.isArray(value)) {
    misfit(LABELS, place, "isn't an object");
  }
  const entries = Object.entries(value);
  if (entries.length > limits.METRICS) misfit(LABELS, place, "has too many metrics");
  for (const [name, number] of entries) {
    text(LABELS, 1, 100)(name, place);
    if (
      typeof number !== "string" ||
      number.length > 32 ||
      !DECIMAL.test(number) ||
      !Number.isFinite(Number(number))
    ) {
      misfit(LABELS, `${place}/${name}`, "isn't a finite number in decimal");
    }
  }
};

/**
 * Refuse tags that aren't sorted, unique and short.
 *
 * @type {Check}
 */
export const tags = (value, place) => {
  array(LABELS, text(LABELS, 1, 100), limits.TAGS)(value, place);
  for (let at = 1; at < value.length; at += 1) {
    if (compareText(value[at - 1], value[at]) >= 0) {
      misfit(LABELS, place, "isn't sorted, or has a tag twice");
    }
  }
};

export const suspect = text("REQ-MAN-013", 1, 1000);
export const durability = oneOf("REQ-MAN-012", "node", "peers");

const PRESENT = {
  state: oneOf("REQ-MAN-003", "present"),
  tensor_count: count,
  nbytes: count,
  stream_count: count,
  leaf_count: count,
};
/** @type {Check} */
const field = (value, place) => {
  if (value?.state === "absent") {
    object("REQ-MAN-003", { state: any, reason })(value, place);
  } else object("REQ-MAN-003", PRESENT, { stored_nbytes: count })(value, place);
};

/** Members of every document, checked before. */
const HEAD = { type: any, format_version: any, features: any };
/** Members of a decided register that isn't a manifest. */
const DECIDED = { run_id: orNull(runId), launch: orNull(integer("REQ-RUN-002")), step: count };
const cause = oneOf("REQ-RUN-063", "data", "state", "hardware", "outside", "program", "unknown");
const sentence = (/** @type {string} */ clause) => text(clause, 0, 1000);

/** @type {Record<string, Check>} For each type of document the check of `signed`. */
export const SCHEMAS = {
  manifest: object(
    "REQ-MAN-001",
    {
      ...HEAD,
      run_id: orNull(runId),
      launch: orNull(integer("REQ-RUN-002")),
      nonce,
      step: count,
      attempt,
      writer_count: integer("REQ-LIM-001", 1, limits.WRITERS),
      block_nbytes: integer("REQ-TEN-005", limits.BLOCK_NBYTES_MIN, limits.BLOCK_NBYTES_MAX),
      saved_unix_s: count,
      profile: oneOf("REQ-MAN-005", "full", "delta"),
      references,
      fields: object("REQ-MAN-003", Object.fromEntries(FIELDS.map((name) => [name, field]))),
      index: object("REQ-MAN-007", {
        name: pattern("REQ-CKP-001", /^index-[0-9a-f]{16}\.msgpack$/),
        nbytes: count,
        digest,
      }),
    },
    { metrics, tags, suspect, durability },
  ),
  abort: object("REQ-MAN-001", { ...HEAD, ...DECIDED, reason }),
  tombstone: object("REQ-MAN-001", { ...HEAD, ...DECIDED, manifest_digest: digest }),
  run: object("REQ-RUN-001", { ...HEAD, run_id: runId }),
  launch: object("REQ-RUN-002", {
    ...HEAD,
    run_id: runId,
    launch: count,
    nonce,
    chosen_by: oneOf("REQ-RUN-007", "lineage", "fallback", "hand"),
    resume_from: orNull(object("REQ-RUN-006", { name: exactName, digest })),
  }),
  vote: object("REQ-RUN-065", {
    ...HEAD,
    run_id: runId,
    launch: count,
    nonce,
    homes: array("REQ-RUN-065", nonce, 64, 1),
  }),
  home: object("REQ-RUN-070", {
    ...HEAD,
    run_id: runId,
    home: nonce,
    homes: array("REQ-RUN-070", nonce, 64),
    launch: count,
  }),
  labels: object("REQ-RUN-023", {
    ...HEAD,
    run_id: runId,
    checkpoint: checkpointName,
    number: integer("REQ-RUN-023", 1),
    pinned: oneOf("REQ-RUN-023", true, false),
    metrics,
    tags,
  }),
  ledger: object("REQ-RUN-043", {
    ...HEAD,
    run_id: runId,
    launch: count,
    started_unix_ms: count,
    measured_unix_ms: count,
    ended_unix_ms: orNull(integer("REQ-RUN-043")),
    first_step: count,
    step: count,
    save_count: count,
    commit_count: count,
    committing_ms: count,
    times_ms: object("REQ-RUN-043", {
      initialising: count,
      waiting: count,
      restoring: count,
      training: count,
      blocked: count,
      lost: count,
    }),
  }),
  witness: object("REQ-RUN-060", {
    ...HEAD,
    run_id: runId,
    launch: count,
    expected: oneOf("REQ-RUN-060", "T1", "S1", "S0"),
    verdict: oneOf("REQ-RUN-060", "expected", "verified", "refuted"),
    first_step: orNull(count),
    last_step: orNull(count),
    step_count: count,
    compared: array("REQ-RUN-060", text("REQ-RUN-060", 0, 64), 16),
    difference: orNull(
      object("REQ-RUN-060", {
        step: count,
        writer: count,
        what: oneOf(
          "REQ-RUN-060",
          "samples",
          "rng",
          "batch",
          "loss",
          "grad_norm",
          "options",
          "weights",
        ),
        text: sentence("REQ-RUN-060"),
      }),
    ),
  }),
  healing: object("REQ-RUN-063", {
    ...HEAD,
    run_id: runId,
    launch: count,
    step: count,
    kind: oneOf("REQ-RUN-063", "alarm", "error", "outside", "lost"),
    evidence: array("REQ-RUN-063", sentence("REQ-RUN-063"), 64),
    choice: oneOf("REQ-RUN-063", "retry", "skip", "back", "stop"),
    resume_from: orNull(text("REQ-RUN-063", 0, 64)),
    skip: orNull(array("REQ-RUN-063", count, 2, 2)),
    sample_count: count,
    suspected: cause,
    text: sentence("REQ-RUN-063"),
    next: sentence("REQ-RUN-063"),
    outcome: orNull(
      object("REQ-RUN-063", {
        launch: count,
        cause,
        text: sentence("REQ-RUN-063"),
      }),
    ),
  }),
  failure: object("REQ-CMT-004", {
    ...HEAD,
    attempt,
    writer: count,
    code: pattern("REQ-CMT-004", /^[A-Z][A-Z0-9_]{0,63}$/),
    detail: sentence("REQ-CMT-004"),
    where: orNull(sentence("REQ-CMT-004")),
    requirement: orNull(pattern("REQ-CMT-004", /^REQ-[A-Z]{3}-[0-9]{3}$/)),
    remedy: sentence("REQ-CMT-004"),
  }),
  pins: object("REQ-CMT-035", { ...HEAD, attempt, writer: count, references }),
};
