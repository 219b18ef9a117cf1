// @ts-check
/**
 * The one error of this package, with the codes of page 80 of the specification.
 *
 * @module
 */

/**
 * Where in the work a fault was found: `open` before a file of tensors is opened, `read` when bytes
 * or values are read, `validate` by a check of everything.
 *
 * @typedef {"open" | "read" | "validate"} Phase
 */

/** @type {Record<string, string>} For each class of codes what a person can do. */
const REMEDIES = {
  FormatError: "Use another checkpoint, and report the fault to the authors of the writer.",
  IntegrityError: "Use another checkpoint, or another copy of this checkpoint.",
  NotFoundError: "Correct the path, or begin without a checkpoint.",
  UnsupportedError: "Install a newer version of this package.",
  LayoutError: "Use another checkpoint: the data of its writers doesn't fit together.",
  StateError: "Correct the call.",
  StoreError: "Check the storage, the network and the permissions, then try again.",
};

/** @type {Record<string, string>} For each code outside of `FormatError` its class. */
const CLASSES = Object.fromEntries(
  Object.entries({
    IntegrityError: `DOC_DIGEST FILE_MISSING FILE_NBYTES BLOCK_DIGEST HEADER_DIGEST
      CHECKPOINT_ABORTED CHECKPOINT_RETIRED NO_VALID_CHECKPOINT BASE_MISSING BASE_MISMATCH
      FILES_IN_CACHES`,
    NotFoundError: "NOT_COMMITTED",
    UnsupportedError: "VERSION_UNSUPPORTED FEATURE_UNSUPPORTED",
    LayoutError: `BOX_BOUNDS TILING_GAP TILING_OVERLAP REPLICA_DIVERGED HELD_NOT_WRITTEN
      TENSOR_DIVERGED LEAF_DIVERGED WRITERS_DIVERGED`,
    StateError: `ARGUMENT TENSOR_MISSING LEAF_MISSING STREAM_MISSING FROZEN_BASE_MISSING
      FROZEN_BASE_CHANGED STATE_NAME`,
    StoreError: "STORE_IO STORE_NO_ANSWER STORE_UNSUPPORTED STORE_ACCESS",
  }).flatMap(([kind, codes]) => codes.split(/\s+/).map((code) => [code, kind])),
);

/** A refusal: a fault of a checkpoint, of the storage, or of a call. */
export class CkptError extends Error {
  /**
   * @param {string} code a code of page 80 of the specification
   * @param {string} detail the finding, in one sentence without a full stop
   * @param {object} [more]
   * @param {string | null} [more.where] the place: a file, a tensor, a range of bytes
   * @param {string | null} [more.clause] the violated clause, such as `REQ-DOC-009`
   * @param {Phase | null} [more.phase]
   * @param {string} [more.remedy] what to do; otherwise the remedy of the code's class
   * @param {unknown} [more.cause]
   */
  constructor(code, detail, more = {}) {
    const { where = null, clause = null, phase = null, cause } = more;
    const remedy = more.remedy ?? REMEDIES[CLASSES[code] ?? "FormatError"];
    super(CkptError.#text(code, detail, where, clause, remedy), cause ? { cause } : undefined);
    this.name = "CkptError";
    /** The code, for programs. */
    this.code = code;
    /** The finding, for people. */
    this.detail = detail;
    /** The place of the fault, or null. */
    this.where = where;
    /** The violated clause of the specification, or null. */
    this.clause = clause;
    /** @type {Phase | null} When the fault was found, or null outside of a checkpoint. */
    this.phase = phase;
    /** What to do. */
    this.remedy = remedy;
  }

  /** The class of the code on page 80, such as `IntegrityError`. */
  get kind() {
    return CLASSES[this.code] ?? "FormatError";
  }

  /**
   * Give place and phase to an error that has none yet.
   *
   * @param {string | null} where @param {Phase} [phase]
   * @returns {this}
   */
  at(where, phase) {
    if (this.where === null && where !== null) {
      this.where = where;
      this.message = CkptError.#text(this.code, this.detail, where, this.clause, this.remedy);
    }
    if (phase) this.phase ??= phase;
    return this;
  }

  /** @param {string} code @param {string} detail @param {string | null} where
   *  @param {string | null} clause @param {string} remedy */
  static #text(code, detail, where, clause, remedy) {
    const place = where === null ? "" : ` at ${where}`;
    const cited = clause === null ? "" : ` [${clause}]`;
    return `${code}${place}: ${detail}${cited}. ${remedy}`;
  }
}

/**
 * Throw a `CkptError`.
 *
 * @param {string} code @param {string} clause @param {string} detail @param {string | null} [where]
 * @returns {never}
 */
export function refuse(code, clause, detail, where = null) {
  throw new CkptError(code, detail, { clause: clause || null, where });
}

/**
 * Call a function, and give place and phase to its errors.
 *
 * @template T
 * @param {string | null} where @param {Phase} phase @param {() => T} work
 * @returns {T}
 */
export function located(where, phase, work) {
  try {
    return work();
  } catch (error) {
    throw error instanceof CkptError ? error.at(where, phase) : error;
  }
}

/**
 * The same for a function that returns a promise.
 *
 * @template T
 * @param {string | null} where @param {Phase} phase @param {() => Promise<T>} work
 * @returns {Promise<T>}
 */
export async function locatedAsync(where, phase, work) {
  try {
    return await work();
  } catch (error) {
    throw error instanceof CkptError ? error.at(where, phase) : error;
  }
}
