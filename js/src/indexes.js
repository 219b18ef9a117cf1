// @ts-check
/** The index of a checkpoint (page 40). @module */
import { checkTiling, exactProduct, product } from "./boxes.js";
import { unzigzag } from "./columns.js";
import { dtypeOf } from "./dtypes.js";
import { located, refuse } from "./errors.js";
import * as limits from "./limits.js";
import { parseTables } from "./msgpack.js";
import { FIELDS } from "./names.js";
import {
  ORIGIN,
  badColumn,
  badOrder,
  byColumns,
  checkAllUsed,
  checkMembers,
  checkOrder,
  countRows,
  offsets,
  openTable,
  readAbsent,
  readAliases,
  readDtypes,
  readOrigin,
  readScopes,
  readTensors,
  shapeOfRow,
} from "./tables.js";

/** @typedef {import("./tables.js").Numbers} Numbers */
/** @typedef {import("./documents.js").Manifest} Manifest */

/**
 * How a tensor is cut into boxes, and which writer's part has each.
 *
 * @typedef {object} Sharding
 * @property {number} ndim
 * @property {number} boxCount
 * @property {Float64Array[] | null} grid for each dimension the begins of its intervals, and the
 *   end; null for other boxes
 * @property {Float64Array} begins of other boxes, box by box
 * @property {Float64Array} shapes of other boxes, box by box
 * @property {Float64Array} writers
 */

/** @typedef {ReturnType<typeof parseIndex>} Index */

/** @param {Sharding} sharding @param {number} box @param {number} dim @returns {number} */
export function boxBegin({ grid, begins, ndim }, box, dim) {
  if (grid === null) return begins[box * ndim + dim];
  return grid[dim][gridPlace(grid, box, dim)];
}

/** @param {Sharding} sharding @param {number} box @param {number} dim @returns {number} */
export function boxExtent({ grid, shapes, ndim }, box, dim) {
  if (grid === null) return shapes[box * ndim + dim];
  const place = gridPlace(grid, box, dim);
  return grid[dim][place + 1] - grid[dim][place];
}

/** @param {Float64Array[]} grid @param {number} box @param {number} dim */
function gridPlace(grid, box, dim) {
  let inner = 1;
  for (let k = dim + 1; k < grid.length; k += 1) inner *= grid[k].length - 1;
  return Math.floor(box / inner) % (grid[dim].length - 1);
}

/** @param {Sharding} sharding @param {number} box @returns {import("./boxes.js").Box} */
export const boxOf = (sharding, box) =>
  Array.from({ length: sharding.ndim }, (_, dim) => {
    const begin = boxBegin(sharding, box, dim);
    return [begin, begin + boxExtent(sharding, box, dim)];
  });

/**
 * Read the tables of shardings.
 *
 * @param {import("./tables.js").Table} table @param {number} writerCount
 */
function readShardings(table, writerCount) {
  const ndim = table.numbers("ndim", -1, limits.NDIM);
  const count = ndim.length;
  const form = table.numbers("form", count, 1);
  const boxCount = table.numbers("box_count", count);
  let gridDims = 0;
  let otherEntries = 0;
  let boxes = 0;
  for (let row = 0; row < count; row += 1) {
    boxes += boxCount[row];
    if (form[row] === 1) gridDims += ndim[row];
    else otherEntries += ndim[row] * boxCount[row];
    if (form[row] === 0 && (boxCount[row] === 0) !== (ndim[row] === 0)) {
      badColumn("REQ-IDX-012", "a sharding without boxes has dimensions, or other boxes have none");
    }
  }
  if (boxes > limits.BOXES) {
    refuse("LIMIT_EXCEEDED", "REQ-LIM-001", `there are ${boxes} boxes, above ${limits.BOXES}`);
  }
  const gridShape = table.numbers("grid_shape", gridDims);
  const intervals = offsets(gridShape)[gridDims];
  const extent = table.numbers("extent", intervals, limits.DIM);
  const begin = unzigzag(table.numbers("begin", otherEntries));
  const boxShape = table.numbers("box_shape", otherEntries, limits.DIM);
  const part = table.numbers("part", boxes, writerCount - 1);
  if (gridShape.some((entry) => entry === 0) || extent.some((entry) => entry === 0)) {
    badColumn("REQ-IDX-002", "a grid has an empty interval, or none");
  }
  /** @type {Sharding[]} */
  const shardings = [];
  let gridAt = 0;
  let extentAt = 0;
  let otherAt = 0;
  let partAt = 0;
  let writer = -1;
  for (let row = 0; row < count; row += 1) {
    const dims = ndim[row];
    const own = boxCount[row];
    const writers = new Float64Array(own);
    for (let box = 0; box < own; box += 1) {
      writer = (writer + 1 + part[partAt + box]) % writerCount;
      writers[box] = writer;
    }
    partAt += own;
    /** @type {Sharding} */
    const sharding = {
      ndim: dims,
      boxCount: own,
      grid: null,
      writers,
      begins: new Float64Array(0),
      shapes: new Float64Array(0),
    };
    if (form[row] === 1) {
      sharding.grid = [];
      for (let dim = 0; dim < dims; dim += 1) {
        const ends = offsets(extent.subarray(extentAt, extentAt + gridShape[gridAt]));
        extentAt += gridShape[gridAt];
        gridAt += 1;
        sharding.grid.push(ends);
      }
      if (product(sharding.grid.map((ends) => ends.length - 1)) !== own) {
        badColumn("REQ-IDX-002", "a grid has another number of boxes than its intervals make");
      }
    } else {
      sharding.begins = new Float64Array(own * dims);
      sharding.shapes = new Float64Array(own * dims);
      for (let dim = 0; dim < dims; dim += 1) {
        let before = 0;
        for (let box = 0; box < own; box += 1) {
          const begins = before + begin[otherAt];
          const shape = boxShape[otherAt];
          if (begins < 0 || begins > limits.DIM)
            badColumn("REQ-IDX-002", "a begin is out of range");
          sharding.begins[box * dims + dim] = begins;
          sharding.shapes[box * dims + dim] = shape;
          before = dim === dims - 1 ? begins + shape : begins;
          otherAt += 1;
        }
      }
    }
    shardings.push(sharding);
  }
  return shardings;
}

/** @param {Sharding} sharding whose boxes aren't stored as a grid */
function checkOtherBoxes(sharding) {
  const { ndim, boxCount, begins, shapes } = sharding;
  checkOrder("the boxes of a sharding", boxCount, (box) => {
    for (const column of [begins, shapes]) {
      for (let dim = 0; dim < ndim; dim += 1) {
        const order = column[(box - 1) * ndim + dim] - column[box * ndim + dim];
        if (order !== 0) return order;
      }
    }
    return 0;
  });
  if (boxCount > 0 && formGrid(sharding)) {
    badOrder("REQ-IDX-012", "the boxes of a sharding form a grid, and aren't stored as one");
  }
}

/** @param {Sharding} sharding whose boxes are sorted */
function formGrid({ ndim, boxCount, begins, shapes }) {
  /** @type {Map<number, number>[]} for each dimension the extent at each begin */
  const intervals = Array.from({ length: ndim }, () => new Map());
  for (let box = 0; box < boxCount; box += 1) {
    for (let dim = 0; dim < ndim; dim += 1) {
      const begin = begins[box * ndim + dim];
      const extent = shapes[box * ndim + dim];
      if (extent === 0 || (intervals[dim].get(begin) ?? extent) !== extent) return false;
      intervals[dim].set(begin, extent);
    }
  }
  for (const interval of intervals) {
    let end = 0;
    for (const begin of [...interval.keys()].sort((a, b) => a - b)) {
      if (begin !== end) return false;
      end += /** @type {number} */ (interval.get(begin));
    }
  }
  // Boxes are pairwise different and made of these intervals: as many as combinations are all.
  return product(intervals.map((interval) => interval.size)) === boxCount;
}

/** @param {Sharding} sharding @returns {string} a text that equal shardings share */
const shardingKey = ({ ndim, grid, begins, shapes, writers }) =>
  `${ndim};${grid === null ? `${begins}|${shapes}` : grid.map(String).join("|")};${writers}`;

/**
 * Parse an index and check all that the document alone shows, except the tiling.
 *
 * @param {Uint8Array} bytes @param {Uint8Array | null} [expected] its digest
 */
export function parseIndex(bytes, expected = null) {
  const { digest, signedNbytes, members } = parseTables(bytes, expected);
  const tables = ["parts", "tensors", "aliases", "shardings", "streams", "leaves"];
  const names = new Set([
    "type",
    "format_version",
    "features",
    ...ORIGIN,
    "saved_unix_s",
    "scopes",
    "dtypes",
    "absent",
    ...tables,
  ]);
  checkMembers(members, "index", () => names);
  countRows(
    members,
    {
      parts: "nbytes",
      tensors: "sharding",
      aliases: "tensor",
      shardings: "form",
      streams: "part",
      leaves: "part",
    },
    [
      ["tensors", "global_shape"],
      ["shardings", "grid_shape"],
      ["shardings", "begin"],
    ],
    signedNbytes,
  );
  const origin = readOrigin(members);
  const writerCount = origin.writer_count;
  const scopes = readScopes(members);
  const dtypes = readDtypes(members);
  const absent = readAbsent(members);
  const partTable = openTable(members, "parts", ["nbytes", "digest"]);
  const parts = {
    nbytes: partTable.numbers("nbytes", writerCount),
    digest: partTable.digests("digest", writerCount),
  };
  const tensorTable = openTable(members, "tensors", [
    "field",
    "name",
    "scope",
    "dtype",
    "ndim",
    "global_shape",
    "storage",
    "sharding",
  ]);
  const tensors = readTensors(tensorTable, scopes.length, dtypes.length);
  const shardingTable = openTable(members, "shardings", [
    "ndim",
    "form",
    "box_count",
    "grid_shape",
    "extent",
    "begin",
    "box_shape",
    "part",
  ]);
  const shardings = readShardings(shardingTable, writerCount);
  const sharding = tensorTable.numbers("sharding", tensors.count, shardings.length - 1);
  const aliases = readAliases(members, tensors.count);
  const streamTable = openTable(members, "streams", ["name", "kind", "scope", "part"]);
  const streamNames = streamTable.strings("name");
  const streams = {
    count: streamNames.length,
    name: streamNames,
    kind: streamTable.strings("kind", streamNames.length),
    scope: streamTable.numbers("scope", streamNames.length, scopes.length - 1),
    part: streamTable.numbers("part", streamNames.length, writerCount - 1),
  };
  checkOrder("streams", streams.count, byColumns(streams.name, streams.scope));
  const leafTable = openTable(members, "leaves", ["name", "field", "scope", "part"]);
  const leafNames = leafTable.strings("name");
  const leaves = {
    count: leafNames.length,
    name: leafNames,
    field: leafTable.numbers("field", leafNames.length, 6),
    scope: leafTable.numbers("scope", leafNames.length, scopes.length - 1),
    part: leafTable.numbers("part", leafNames.length, writerCount - 1),
  };
  checkOrder("leaves", leaves.count, byColumns(leaves.field, leaves.name, leaves.scope));
  checkAllUsed("scopes", scopes.length, [tensors.scope, streams.scope, leaves.scope]);
  checkAllUsed("dtypes", dtypes.length, [tensors.dtype]);
  checkShardings(tensors, sharding, shardings);
  return {
    digest,
    origin,
    scopes,
    dtypes,
    absent,
    parts,
    tensors,
    sharding,
    shardings,
    aliases,
    streams,
    leaves,
  };
}

/**
 * Check the clauses about tensors and their shardings.
 *
 * @param {import("./tables.js").TensorRows} tensors
 * @param {Numbers} used
 * @param {Sharding[]} shardings
 */
function checkShardings(tensors, used, shardings) {
  const seen = new Set();
  for (const sharding of shardings) {
    if (sharding.grid === null) checkOtherBoxes(sharding);
    const key = shardingKey(sharding);
    if (seen.has(key)) badOrder("REQ-IDX-009", "a sharding is stored twice");
    seen.add(key);
  }
  let next = 0;
  for (let row = 0; row < tensors.count; row += 1) {
    if (used[row] > next) badOrder("REQ-IDX-009", "shardings aren't in the order of first use");
    if (used[row] === next) next += 1;
    const sharding = shardings[used[row]];
    const shape = shapeOfRow(tensors, row);
    if (sharding.ndim !== shape.length && sharding.boxCount > 0) {
      badColumn("REQ-IDX-010", "a tensor has another number of dimensions than its sharding");
    }
  }
  if (next !== shardings.length) badOrder("REQ-IDX-009", "a sharding isn't used by any tensor");
}

/**
 * Check that the boxes of each tensor tile the tensor, after the summaries of the manifest.
 *
 * @param {Index} index
 */
export function checkTilings({ tensors, sharding, shardings }) {
  /** @type {Set<string>} */
  const tiled = new Set();
  for (let row = 0; row < tensors.count; row += 1) {
    const shape = shapeOfRow(tensors, row);
    const key = `${sharding[row]}:${shape}`;
    if (tiled.has(key)) continue;
    tiled.add(key);
    located(`the tensor ${JSON.stringify(tensors.name[row])}`, "open", () =>
      checkCut(shape, shardings[sharding[row]]),
    );
  }
}

/** @param {number[]} shape @param {Sharding} sharding */
function checkCut(shape, sharding) {
  if (sharding.grid === null) {
    checkTiling(
      shape,
      sharding.boxCount,
      (box, dim) => boxBegin(sharding, box, dim),
      (box, dim) => boxExtent(sharding, box, dim),
    );
    return;
  }
  const ends = sharding.grid.map((begins) => begins[begins.length - 1]);
  const cutCount = sharding.grid.filter(
    (begins, dim) => begins.length > 2 || begins[1] !== shape[dim],
  ).length;
  if (ends.some((end, dim) => end > shape[dim])) {
    refuse("BOX_BOUNDS", "REQ-IDX-004", "a box exceeds the bounds of the tensor");
  }
  if (cutCount > limits.SPLIT_NDIM || sharding.boxCount * 2 ** cutCount > limits.CORNERS) {
    refuse("LIMIT_EXCEEDED", "REQ-LIM-001", "a tensor is cut in too many dimensions or boxes");
  }
  if (ends.some((end, dim) => end < shape[dim])) {
    refuse("TILING_GAP", "REQ-IDX-004", "the boxes leave a part of the tensor uncovered");
  }
}

/**
 * Check an index against the manifest that names it: origin, absent fields, summaries.
 *
 * @param {Index} index @param {Manifest} manifest
 */
export function checkAgainstManifest(index, manifest) {
  for (const name of [...ORIGIN, /** @type {const} */ ("saved_unix_s")]) {
    if (index.origin[name] !== manifest[name]) {
      refuse("DOC_MISMATCH", "REQ-IDX-001", `index and manifest have another ${name}`);
    }
  }
  const { tensors, leaves, streams } = index;
  FIELDS.forEach((field, number) => {
    const summary = manifest.fields[field];
    let tensorCount = 0;
    let nbytes = 0n;
    for (let row = 0; row < tensors.count; row += 1) {
      if (tensors.field[row] !== number) continue;
      tensorCount += 1;
      nbytes +=
        exactProduct(shapeOfRow(tensors, row)) *
        BigInt(dtypeOf(index.dtypes[tensors.dtype[row]]).nbytes);
    }
    let leafCount = 0;
    for (const entry of leaves.field) leafCount += Number(entry === number);
    const streamCount = field === "rng" ? streams.count : 0;
    const reason = index.absent.get(field);
    if (summary.state === "absent") {
      if (reason !== summary.reason) {
        refuse(
          "MANIFEST_SUMMARY",
          "REQ-MAN-006",
          `${field} is absent for another reason in the index`,
        );
      }
      if (tensorCount + leafCount + streamCount > 0) {
        refuse("MANIFEST_SUMMARY", "REQ-MAN-006", `the absent field ${field} has content`);
      }
      return;
    }
    if (
      reason !== undefined ||
      summary.tensor_count !== tensorCount ||
      BigInt(summary.nbytes) !== nbytes ||
      summary.leaf_count !== leafCount ||
      summary.stream_count !== streamCount
    ) {
      refuse(
        "MANIFEST_SUMMARY",
        "REQ-MAN-006",
        `the summary of ${field} doesn't follow from the index`,
      );
    }
  });
}
