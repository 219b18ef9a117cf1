// @ts-check
/** What index and part have in common: members, tables, columns, rows (page 40). @module */
import { parsePacked, parseStrings } from "./columns.js";
import { checkHead, isDocumentString, isPowerOfTwo } from "./documents.js";
import { DTYPES } from "./dtypes.js";
import { refuse } from "./errors.js";
import * as limits from "./limits.js";
import { FIELDS, isLaterVersion } from "./names.js";
import { metrics as checkMetrics, tags as checkTags } from "./schema.js";
import { compareText, utf8Length } from "./text.js";

/** @typedef {import("./columns.js").Numbers} Numbers */
/** @typedef {import("./msgpack.js").Value} Value */
/** @typedef {import("./msgpack.js").ValueMap} ValueMap */

/**
 * The origin of an attempt, equal in manifest, index and parts.
 *
 * @typedef {object} Origin
 * @property {string | null} run_id
 * @property {number | null} launch
 * @property {string} nonce
 * @property {number} step
 * @property {string} attempt
 * @property {number} writer_count
 * @property {number} block_nbytes
 */
export const ORIGIN = /** @type {const} */ ([
  "run_id",
  "launch",
  "nonce",
  "step",
  "attempt",
  "writer_count",
  "block_nbytes",
]);

/**
 * The rows of the table `tensors`.
 *
 * @typedef {object} TensorRows
 * @property {number} count
 * @property {Numbers} field
 * @property {string[]} name
 * @property {Numbers} scope
 * @property {Numbers} dtype
 * @property {Numbers} ndim
 * @property {Numbers} storage
 * @property {Numbers} globalShape flattened
 * @property {Float64Array} dimBegin where the extents of each row begin; one more for the end
 */

/** @param {string} clause @param {string} detail @returns {never} */
export const badColumn = (clause, detail) => refuse("COLUMN_FORM", clause, detail);
/** @param {string} clause @param {string} detail @returns {never} */
export const badOrder = (clause, detail) => refuse("COLUMN_ORDER", clause, detail);
/** @param {string} clause @param {string} detail @returns {never} */
export const badMember = (clause, detail) => refuse("DOC_SCHEMA", clause, detail);

/** @param {Value} value @returns {any} the same as values of JSON */
function plain(value) {
  if (value instanceof Map) {
    return Object.fromEntries([...value].map(([key, member]) => [key, plain(member)]));
  }
  return Array.isArray(value) ? value.map(plain) : value;
}

/**
 * Check the members that come before all tables.
 *
 * @param {ValueMap} members @param {"index" | "part"} type
 * @param {(features: string[]) => Set<string>} expected the names of all members
 * @returns {string[]} the reader features
 */
export function checkMembers(members, type, expected) {
  checkHead(
    {
      format_version: members.get("format_version"),
      features: plain(members.get("features") ?? null),
    },
    type === "part",
  );
  const features = plain(/** @type {Value} */ (members.get("features"))).reader;
  const names = expected(features);
  const isOpen = isLaterVersion(members.get("format_version"));
  for (const name of members.keys()) {
    if (!names.has(name) && !isOpen) badMember("REQ-DOC-011", `the member ${name} is unknown`);
  }
  for (const name of names) {
    if (!members.has(name)) badMember("REQ-DOC-011", `the member ${name} is missing`);
  }
  if (members.get("type") !== type)
    badMember("REQ-DOC-011", `the document isn't of the type ${type}`);
  return features;
}

/** @param {Value | undefined} value @param {number} least @param {number} most */
const isCount = (value, least = 0, most = limits.JSON_INTEGER) =>
  typeof value === "number" && value >= least && value <= most;

/** @param {Value | undefined} value @param {RegExp} pattern */
const fits = (value, pattern) => typeof value === "string" && pattern.test(value);

/**
 * Check origin and `saved_unix_s`.
 *
 * @param {ValueMap} members
 * @returns {Origin & {saved_unix_s: number}}
 */
export function readOrigin(members) {
  const runId = members.get("run_id");
  const launch = members.get("launch");
  const blockNbytes = members.get("block_nbytes");
  if (
    !(runId === null || fits(runId, /^[0-9a-f]{32}$/)) ||
    !(launch === null || isCount(launch)) ||
    !fits(members.get("nonce"), /^[0-9a-f]{32}$/) ||
    !isCount(members.get("step")) ||
    !fits(members.get("attempt"), /^[0-9a-f]{16}$/) ||
    !isCount(members.get("writer_count"), 1, limits.WRITERS) ||
    !isCount(blockNbytes, limits.BLOCK_NBYTES_MIN, limits.BLOCK_NBYTES_MAX) ||
    !isPowerOfTwo(/** @type {number} */ (blockNbytes)) ||
    !isCount(members.get("saved_unix_s"))
  ) {
    badMember("REQ-DOC-011", "a member of the origin has another type or range");
  }
  if ((runId === null) !== (launch === null)) {
    badMember("REQ-MAN-008", "one of run_id and launch is null, and the other isn't");
  }
  const names = [...ORIGIN, "saved_unix_s"];
  return /** @type {any} */ (Object.fromEntries(names.map((name) => [name, members.get(name)])));
}

/**
 * Open a table: a map of exactly these columns.
 *
 * @param {ValueMap} members @param {string} name @param {string[]} columns
 */
export function openTable(members, name, columns) {
  const table = members.get(name);
  if (!(table instanceof Map)) return badMember("REQ-IDX-002", `${name} isn't a table`);
  for (const column of table.keys()) {
    if (!columns.includes(column))
      badMember("REQ-IDX-002", `the column ${name}.${column} is unknown`);
  }
  for (const column of columns) {
    if (!table.has(column)) badMember("REQ-IDX-002", `the column ${name}.${column} is missing`);
  }
  const get = (/** @type {string} */ column) => /** @type {Value} */ (table.get(column));
  const sized = (
    /** @type {string} */ column,
    /** @type {number} */ have,
    /** @type {number} */ count,
  ) => {
    if (count >= 0 && have !== count) {
      badColumn("REQ-IDX-002", `${name}.${column} has ${have} entries instead of ${count}`);
    }
  };
  return {
    /** @param {string} column @param {number} [count] @param {number} [most] @returns {Numbers} */
    numbers(column, count = -1, most = Infinity) {
      const numbers = parsePacked(get(column));
      sized(column, numbers.length, count);
      if (most !== Infinity) {
        for (let row = 0; row < numbers.length; row += 1) {
          if (numbers[row] > most) {
            badColumn("REQ-IDX-002", `${name}.${column} has ${numbers[row]}, above ${most}`);
          }
        }
      }
      return numbers;
    },
    /**
     * @param {string} column
     * @param {number} [count]
     * @param {number} [nbytes]
     * @returns {string[]}
     */
    strings(column, count = -1, nbytes = limits.NAME_NBYTES) {
      const strings = parseStrings(get(column));
      sized(column, strings.length, count);
      for (const text of strings) {
        if (text.length * 3 > nbytes && utf8Length(text) > nbytes) {
          refuse("LIMIT_EXCEEDED", "REQ-LIM-001", `a string of ${name}.${column} is too long`);
        }
      }
      return strings;
    },
    /** @param {string} column @param {number} count @returns {Uint8Array} digests of 32 bytes */
    digests(column, count) {
      const bytes = get(column);
      if (!(bytes instanceof Uint8Array) || bytes.length !== 32 * count) {
        return badColumn("REQ-IDX-002", `${name}.${column} hasn't 32 bytes for each row`);
      }
      return bytes;
    },
    /** @param {string} column @param {number} count @returns {Uint8Array[]} */
    blobs(column, count) {
      const blobs = get(column);
      if (!Array.isArray(blobs) || !blobs.every((blob) => blob instanceof Uint8Array)) {
        return badColumn("REQ-IDX-002", `${name}.${column} isn't a list of byte strings`);
      }
      sized(column, blobs.length, count);
      return /** @type {Uint8Array[]} */ (blobs);
    },
  };
}

/** @typedef {ReturnType<typeof openTable>} Table */

/** @param {ValueMap} members @param {string} name @returns {string[]} */
function stringList(members, name) {
  const list = members.get(name);
  if (!Array.isArray(list) || !list.every((entry) => typeof entry === "string")) {
    return badColumn("REQ-IDX-002", `${name} isn't a list of strings`);
  }
  return /** @type {string[]} */ (list);
}

/** @param {string[]} list @param {string} name */
function checkAscending(list, name) {
  for (let at = 1; at < list.length; at += 1) {
    if (compareText(list[at - 1], list[at]) >= 0) {
      badOrder("REQ-IDX-003", `${name} isn't sorted, or has an entry twice`);
    }
  }
}

/** @param {ValueMap} members @returns {string[]} */
export function readScopes(members) {
  const scopes = stringList(members, "scopes");
  for (const scope of scopes) {
    if (!/^(global|lw\/(0|[1-9][0-9]{0,8}))$/.test(scope)) {
      refuse("SCOPE_FORM", "REQ-IDX-006", `${scope} isn't a scope`);
    }
  }
  checkAscending(scopes, "scopes");
  return scopes;
}

/** @param {ValueMap} members @returns {string[]} */
export function readDtypes(members) {
  const dtypes = stringList(members, "dtypes");
  for (const dtype of dtypes) {
    if (!DTYPES.has(dtype)) badColumn("REQ-TEN-003", `${dtype} isn't a dtype`);
  }
  checkAscending(dtypes, "dtypes");
  return dtypes;
}

/** @param {ValueMap} members @returns {Map<string, string>} from field to reason */
export function readAbsent(members) {
  const absent = members.get("absent");
  if (!(absent instanceof Map)) {
    return refuse("MANIFEST_FIELDS", "REQ-MAN-003", "absent isn't a map");
  }
  for (const [field, reason] of absent) {
    if (
      !FIELDS.includes(/** @type {any} */ (field)) ||
      typeof reason !== "string" ||
      !isDocumentString(reason) ||
      reason === "" ||
      [...reason].length > 1000
    ) {
      refuse("MANIFEST_FIELDS", "REQ-MAN-003", `absent has no field, or no reason, for ${field}`);
    }
  }
  return /** @type {Map<string, string>} */ (absent);
}

/**
 * Check the strict order of rows.
 *
 * @param {string} name of the table @param {number} count
 * @param {(row: number) => number} compare the row before with a row
 */
export function checkOrder(name, count, compare) {
  for (let row = 1; row < count; row += 1) {
    if (compare(row) >= 0) {
      badOrder("REQ-IDX-003", `the rows of ${name} aren't sorted, or one is there twice`);
    }
  }
}

/**
 * Compare a row with the row before by columns, the most significant first.
 *
 * @param {(Numbers | string[])[]} columns
 * @returns {(row: number) => number}
 */
export const byColumns =
  (...columns) =>
  (row) => {
    for (const column of columns) {
      const before = column[row - 1];
      const entry = column[row];
      const order =
        typeof before === "string"
          ? compareText(before, /** @type {string} */ (entry))
          : before - /** @type {number} */ (entry);
      if (order !== 0) return order;
    }
    return 0;
  };

/**
 * Read the table `tensors` without its last column.
 *
 * @param {Table} table @param {number} scopeCount @param {number} dtypeCount
 * @returns {TensorRows}
 */
export function readTensors(table, scopeCount, dtypeCount) {
  const field = table.numbers("field", -1, 6);
  const count = field.length;
  if (count > limits.TENSORS) {
    refuse("LIMIT_EXCEEDED", "REQ-LIM-001", `there are ${count} tensors, above ${limits.TENSORS}`);
  }
  const name = table.strings("name", count);
  const scope = table.numbers("scope", count, scopeCount - 1);
  const dtype = table.numbers("dtype", count, dtypeCount - 1);
  const ndim = table.numbers("ndim", count, limits.NDIM);
  const dimBegin = offsets(ndim);
  const globalShape = table.numbers("global_shape", dimBegin[count], limits.DIM);
  for (let row = 0; row < count; row += 1) {
    let product = 1;
    for (let at = dimBegin[row]; at < dimBegin[row + 1]; at += 1) product *= globalShape[at] || 1;
    if (product > Number(limits.ELEMENTS)) {
      badColumn("REQ-IDX-002", "a tensor has too many elements");
    }
  }
  const storage = table.numbers("storage", count, 1);
  checkOrder("tensors", count, byColumns(field, name, scope));
  return { count, field, name, scope, dtype, ndim, storage, globalShape, dimBegin };
}

/** @param {TensorRows} tensors @param {number} row @returns {number[]} */
export const shapeOfRow = (tensors, row) =>
  Array.from(tensors.globalShape.subarray(tensors.dimBegin[row], tensors.dimBegin[row + 1]));

/**
 * Return where the entries of each row begin in a flattened column, and the end.
 *
 * @param {ArrayLike<number>} counts
 * @returns {Float64Array}
 */
export function offsets(counts) {
  const begins = new Float64Array(counts.length + 1);
  for (let row = 0; row < counts.length; row += 1) begins[row + 1] = begins[row] + counts[row];
  return begins;
}

/**
 * Read the table `aliases`.
 *
 * @param {ValueMap} members @param {number} tensorCount
 * @returns {{tensor: Numbers, name: string[]}}
 */
export function readAliases(members, tensorCount) {
  const table = openTable(members, "aliases", ["tensor", "name"]);
  const tensor = table.numbers("tensor", -1, tensorCount - 1);
  const name = table.strings("name", tensor.length);
  checkOrder("aliases", tensor.length, byColumns(tensor, name));
  return { tensor, name };
}

/**
 * Check that `scopes` and `dtypes` hold exactly what occurs.
 *
 * @param {string} name @param {number} count @param {Numbers[]} columns
 */
export function checkAllUsed(name, count, columns) {
  const used = new Set();
  for (const column of columns) for (const entry of column) used.add(entry);
  if (used.size !== count) badOrder("REQ-IDX-007", `${name} has an entry that doesn't occur`);
}

/**
 * Read the labels of a part, or refuse them.
 *
 * @param {ValueMap} members
 * @returns {{metrics?: Record<string, string>, tags?: string[], suspect?: any, durability?: any}}
 */
export function readLabels(members) {
  /** @type {Record<string, any>} */
  const found = {};
  for (const name of ["metrics", "tags", "suspect", "durability"]) {
    if (members.has(name)) found[name] = plain(/** @type {Value} */ (members.get(name)));
  }
  if ("metrics" in found) checkMetrics(found.metrics, "/metrics");
  if ("tags" in found) checkTags(found.tags, "/tags");
  if (
    "suspect" in found &&
    !(
      typeof found.suspect === "string" &&
      found.suspect.length > 0 &&
      [...found.suspect].length <= 1000
    )
  ) {
    badMember("REQ-MAN-013", "suspect isn't a text of 1 to 1000 characters");
  }
  if ("durability" in found && found.durability !== "node" && found.durability !== "peers") {
    badMember("REQ-MAN-012", "durability is neither node nor peers");
  }
  for (const text of [
    ...Object.keys(found.metrics ?? {}),
    ...(found.tags ?? []),
    ...("suspect" in found ? [found.suspect] : []),
  ]) {
    if (!isDocumentString(text)) badMember("REQ-MAN-011", "a label can't stand in a manifest");
  }
  return found;
}

/**
 * Check the limits on rows and extents for the stored size of the document, before any object is
 * built from rows (REQ-DOC-029).
 *
 * @param {ValueMap} members
 * @param {Record<string, string>} rows for each table a packed column with one entry for each row
 * @param {[string, string][]} extents columns whose entries are extents
 * @param {number} signedNbytes
 */
export function countRows(members, rows, extents, signedNbytes) {
  // Columns of another form are refused later, by their own checks.
  const countOf = (/** @type {string} */ table, /** @type {string} */ column) => {
    const columns = members.get(table);
    const packed = columns instanceof Map ? columns.get(column) : null;
    const [width, planes] = Array.isArray(packed) ? packed : [];
    return planes instanceof Uint8Array && typeof width === "number" && width > 0
      ? planes.length / width
      : 0;
  };
  const sum = (/** @type {[string, string][]} */ columns) =>
    columns.reduce((total, [table, column]) => total + countOf(table, column), 0);
  const rowCount = sum(Object.entries(rows));
  const extentCount = sum(extents);
  if (rowCount > Math.floor(signedNbytes / limits.ROW_NBYTES)) {
    refuse("LIMIT_EXCEEDED", "REQ-DOC-029", `${rowCount} rows are too many for the stored bytes`);
  }
  if (extentCount > limits.EXTENT_RATIO * signedNbytes) {
    refuse(
      "LIMIT_EXCEEDED",
      "REQ-DOC-029",
      `${extentCount} extents are too many for the stored bytes`,
    );
  }
}
