// @ts-check
/** The parts of a checkpoint, full ones and those of deltas (pages 40 and 45). @module */
import { blake3 } from "./blake3.js";
import { product } from "./boxes.js";
import { unzigzag } from "./columns.js";
import { checkFeatureMembers } from "./documents.js";
import { dtypeOf } from "./dtypes.js";
import { refuse } from "./errors.js";
import * as limits from "./limits.js";
import { parseTables } from "./msgpack.js";
import {
  EARLIER_VERSIONS,
  ENCODINGS,
  FULL_FEATURES,
  isShardName,
  parseCheckpointName,
} from "./names.js";
import {
  ORIGIN,
  badColumn,
  badMember,
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
  readLabels,
  readOrigin,
  readScopes,
  readTensors,
} from "./tables.js";
import { compareBytes, equalBytes, toHex, utf8 } from "./text.js";
import { countTreeItems } from "./tree.js";

/** @typedef {import("./tables.js").Numbers} Numbers */
/** @typedef {import("./msgpack.js").ValueMap} ValueMap */
/** @typedef {ReturnType<typeof parsePart>} Part */

/**
 * Return the header of every pack of a part: 64 bytes.
 *
 * @param {string} version of the part
 */
function packHeader(version) {
  const header = new Uint8Array(64);
  header.set(utf8(`ckptfmt pack ${EARLIER_VERSIONS.includes(version) ? version : "1.0"}\n`));
  return header;
}

const DELTA_ENCODINGS = new Set(["xor", "difference", "sparse", "classes"]);

/**
 * @param {ValueMap} members
 * @param {boolean} isDelta
 * @returns {{name: string, digest: string}[]}
 */
function readReferences(members, isDelta) {
  const list = members.get("references");
  if (!isDelta) {
    if (!Array.isArray(list) || list.length > 0) {
      refuse("PROFILE_MISMATCH", "REQ-MAN-005", "a full part has references");
    }
    return [];
  }
  if (!Array.isArray(list)) return badColumn("REQ-IDX-002", "references isn't a list");
  if (list.length > limits.REFERENCES) {
    refuse("LIMIT_EXCEEDED", "REQ-DEL-021", "there are too many references");
  }
  /** @type {Uint8Array | null} */
  let before = null;
  return list.map((entry) => {
    const name = entry instanceof Map ? entry.get("name") : undefined;
    const digest = entry instanceof Map ? entry.get("digest") : undefined;
    if (
      !(entry instanceof Map) ||
      entry.size !== 2 ||
      typeof name !== "string" ||
      !(digest instanceof Uint8Array) ||
      digest.length !== 32
    ) {
      return badColumn("REQ-IDX-002", "a reference isn't a name and a digest");
    }
    if (parseCheckpointName(name) === null) {
      refuse("UNSAFE_PATH", "REQ-DEL-002", `${name} isn't the name of a checkpoint`);
    }
    if (before !== null && compareBytes(before, digest) >= 0) {
      badOrder("REQ-DEL-002", "references aren't sorted by their digests");
    }
    before = digest;
    return { name, digest: `blake3:${toHex(digest)}` };
  });
}

/** @param {ValueMap} members @param {boolean} isDelta @returns {string[]} */
function readEncodings(members, isDelta) {
  const list = members.get("encodings");
  if (!isDelta) {
    if (!Array.isArray(list) || list.length !== 1 || list[0] !== "raw") {
      refuse("PROFILE_MISMATCH", "REQ-MAN-005", "a full part has other encodings than raw");
    }
    return ["raw"];
  }
  if (!Array.isArray(list)) return badColumn("REQ-IDX-002", "encodings isn't a list");
  const places = list.map((name) => ENCODINGS.indexOf(/** @type {any} */ (name)));
  if (places.includes(-1)) badColumn("REQ-DEL-003", "encodings has an unknown encoding");
  if (places.some((place, at) => at > 0 && places[at - 1] >= place)) {
    badOrder("REQ-DEL-003", "encodings aren't in the order of the registry");
  }
  return /** @type {string[]} */ (list);
}

/**
 * @param {ValueMap} members @param {string} attempt @param {number} writer @param {boolean} isDelta
 */
function readFiles(members, attempt, writer, isDelta) {
  const table = openTable(members, "files", [
    "name",
    "kind",
    "nbytes",
    "header_nbytes",
    "header_digest",
  ]);
  const name = table.strings("name");
  const count = name.length;
  const kind = table.strings("kind", count);
  const nbytes = table.numbers("nbytes", count);
  const headerNbytes = table.numbers("header_nbytes", count);
  const headerDigest = table.digests("header_digest", count);
  const packDigest = blake3(packHeader(/** @type {string} */ (members.get("format_version"))));
  for (let row = 0; row < count; row += 1) {
    if (kind[row] !== "safetensors" && !(isDelta && kind[row] === "pack")) {
      badColumn("REQ-PRT-003", `${kind[row]} is no kind of a file here`);
    }
    if (!isShardName(name[row], attempt, writer)) {
      refuse(
        "UNSAFE_PATH",
        "REQ-CKP-001",
        `${JSON.stringify(name[row])} isn't the name of a file of ` + "this part",
      );
    }
    if (!name[row].endsWith(`.${kind[row]}`)) {
      badColumn("REQ-PRT-003", `${name[row]} doesn't end in its kind`);
    }
    if (headerNbytes[row] > limits.SHARD_HEADER_NBYTES + 8) {
      refuse("LIMIT_EXCEEDED", "REQ-SHD-001", `the header of ${name[row]} is too long`);
    }
    if (
      kind[row] === "pack" &&
      (headerNbytes[row] !== 64 ||
        !equalBytes(headerDigest.subarray(32 * row, 32 * row + 32), packDigest))
    ) {
      badColumn("REQ-DEL-012", `${name[row]} hasn't the header of a pack`);
    }
  }
  checkOrder("files", count, byColumns(name));
  return { count, name, kind, nbytes, headerNbytes, headerDigest };
}

/**
 * Parse a part and check all that the document alone shows.
 *
 * @param {Uint8Array} bytes @param {Uint8Array | null} [expected] its digest
 */
export function parsePart(bytes, expected = null) {
  const { digest, signedNbytes, members } = parseTables(bytes, expected);
  let isDelta = false;
  const tables = ["files", "tensors", "aliases", "boxes", "extents", "streams", "leaves"];
  const features = checkMembers(members, "part", (own) => {
    isDelta = own.some((name) => !FULL_FEATURES.has(name));
    return new Set([
      "type",
      "format_version",
      "features",
      ...ORIGIN,
      "saved_unix_s",
      "writer",
      "references",
      "encodings",
      "scopes",
      "dtypes",
      "absent",
      "digests",
      ...tables,
      ...(isDelta ? ["stored", "groups"] : []),
      ...(own.includes("labels") ? ["metrics", "tags"] : []),
      ...(own.includes("suspect") ? ["suspect"] : []),
      ...(own.includes("caches") ? ["durability"] : []),
    ]);
  });
  countRows(
    members,
    {
      tensors: "box_count",
      aliases: "tensor",
      boxes: "replica",
      extents: "box",
      files: "nbytes",
      groups: "reference",
      streams: "scope",
      leaves: "scope",
    },
    [
      ["tensors", "global_shape"],
      ["boxes", "begin"],
    ],
    signedNbytes,
  );
  const references = readReferences(members, isDelta);
  const encodings = readEncodings(members, isDelta);
  const origin = readOrigin(members);
  const writer = members.get("writer");
  if (typeof writer !== "number" || writer < 0 || writer >= origin.writer_count) {
    return badMember("REQ-DOC-011", "writer isn't the number of a writer");
  }
  const labels = readLabels(members);
  checkFeatureMembers(
    { features: { reader: features }, run_id: origin.run_id, ...labels },
    writer === 0,
  );
  const scopes = readScopes(members);
  const dtypes = readDtypes(members);
  const absent = readAbsent(members);
  const files = readFiles(members, origin.attempt, writer, isDelta);

  const tensorTable = openTable(members, "tensors", [
    "field",
    "name",
    "scope",
    "dtype",
    "ndim",
    "global_shape",
    "storage",
    "box_count",
  ]);
  const tensors = readTensors(tensorTable, scopes.length, dtypes.length);
  const tensorBoxes = tensorTable.numbers("box_count", tensors.count);
  const boxBegin = offsets(tensorBoxes);
  const boxCount = boxBegin[tensors.count];
  if (boxCount > limits.BOXES) {
    refuse("LIMIT_EXCEEDED", "REQ-LIM-001", `there are ${boxCount} boxes, above ${limits.BOXES}`);
  }
  const aliases = readAliases(members, tensors.count);

  const boxTable = openTable(members, "boxes", ["begin", "cut_shape", "replica", "digest_count"]);
  let entryCount = 0;
  for (let row = 0; row < tensors.count; row += 1)
    entryCount += tensors.ndim[row] * tensorBoxes[row];
  const begin = boxTable.numbers("begin", entryCount, limits.DIM);
  const cutShape = boxTable.numbers("cut_shape", entryCount, limits.DIM + 1);
  const replica = boxTable.numbers("replica", boxCount, 1);
  const digestCount = boxTable.numbers("digest_count", boxCount);
  const digestBegin = offsets(digestCount);
  const digests = members.get("digests");
  if (!(digests instanceof Uint8Array) || digests.length !== 32 * digestBegin[boxCount]) {
    return badColumn("REQ-IDX-002", "digests hasn't 32 bytes for each block");
  }

  const extentTable = openTable(members, "extents", [
    "box",
    "block_begin",
    "block_count",
    "file",
    "gap_nbytes",
    "encoding",
    "key",
    ...(isDelta ? ["reference", "predicted"] : []),
  ]);
  const boxSteps = unzigzag(extentTable.numbers("box"));
  const extentCount = boxSteps.length;
  const extentBox = new Float64Array(extentCount);
  for (let row = 0, last = -1; row < extentCount; row += 1) {
    last = extentBox[row] = last + 1 + boxSteps[row];
    if (last < 0 || last >= boxCount) badColumn("REQ-IDX-002", "extents.box isn't a row of boxes");
  }
  const extents = {
    count: extentCount,
    box: extentBox,
    blockBegin: extentTable.numbers("block_begin", extentCount),
    blockCount: extentTable.numbers("block_count", extentCount),
    file: extentTable.numbers("file", extentCount, files.count - (isDelta ? 0 : 1)),
    gap: extentTable.numbers("gap_nbytes", extentCount),
    encoding: extentTable.numbers("encoding", extentCount, encodings.length - 1),
    key: extentTable.strings("key", extentCount, limits.KEY_NBYTES),
    reference: isDelta
      ? extentTable.numbers("reference", extentCount, references.length)
      : new Uint8Array(extentCount),
    predicted: isDelta
      ? extentTable.numbers("predicted", extentCount, 1)
      : new Uint8Array(extentCount),
    /** First byte of each extent in its file. */
    byteBegin: new Float64Array(extentCount),
    /** Bytes of each extent in its file. */
    nbytes: new Float64Array(extentCount),
    /** Row in `stored` of the first block of each extent. */
    storedBegin: new Float64Array(extentCount),
  };
  let storedCount = 0;
  for (let row = 0; row < extentCount; row += 1) {
    extents.storedBegin[row] = storedCount;
    const encoding = encodings[extents.encoding[row]];
    if (encoding !== "raw" && encoding !== "same") storedCount += extents.blockCount[row];
  }
  /** @type {{nbytes: Numbers, digest: Uint8Array}} */
  let stored = { nbytes: new Uint8Array(0), digest: new Uint8Array(0) };
  const noNumbers = new Uint8Array(0);
  let groups = {
    count: 0,
    kind: /** @type {string[]} */ ([]),
    rule: /** @type {Uint8Array[]} */ ([]),
    reference: /** @type {Numbers} */ (noNumbers),
    boxes: /** @type {number[][]} */ ([]),
  };
  if (isDelta) {
    const storedTable = openTable(members, "stored", ["nbytes", "digest"]);
    stored = {
      nbytes: storedTable.numbers("nbytes", storedCount),
      digest: storedTable.digests("digest", storedCount),
    };
    groups = readGroups(members, references.length, boxCount);
  }

  const streamTable = openTable(members, "streams", ["name", "kind", "scope", "state"]);
  const streamName = streamTable.strings("name");
  const streams = {
    count: streamName.length,
    name: streamName,
    kind: streamTable.strings("kind", streamName.length),
    scope: streamTable.numbers("scope", streamName.length, scopes.length - 1),
    state: streamTable.blobs("state", streamName.length),
  };
  checkOrder("streams", streams.count, byColumns(streams.name, streams.scope));
  const leafTable = openTable(members, "leaves", ["name", "field", "scope", "value"]);
  const leafName = leafTable.strings("name");
  const leaves = {
    count: leafName.length,
    name: leafName,
    field: leafTable.numbers("field", leafName.length, 6),
    scope: leafTable.numbers("scope", leafName.length, scopes.length - 1),
    value: leafTable.blobs("value", leafName.length),
  };
  checkOrder("leaves", leaves.count, byColumns(leaves.field, leaves.name, leaves.scope));

  checkTrees([...streams.state, ...leaves.value, ...groups.rule], signedNbytes);

  const part = {
    digest,
    isDelta,
    features,
    references,
    encodings,
    origin,
    writer,
    labels,
    scopes,
    dtypes,
    absent,
    files,
    tensors,
    tensorBoxes,
    boxBegin,
    boxCount,
    aliases,
    begin,
    replica,
    digestCount,
    digestBegin,
    digests,
    extents,
    stored,
    groups,
    streams,
    leaves,
    ...placeBoxes(tensors, tensorBoxes, dtypes, begin, cutShape, origin.block_nbytes),
    /** @type {Map<string, number> | null} made by `findTensor` when it is called first */
    rowByKey: null,
    /** @type {number[][] | null} made by `extentsOfBox` when it is called first */
    rowsByBox: null,
    /** For each box its group, or -1, and its place in the group. */
    groupOf: new Int32Array(isDelta ? boxCount : 0).fill(-1),
    roleOf: new Int32Array(isDelta ? boxCount : 0),
  };
  checkAllUsed("scopes", scopes.length, [tensors.scope, streams.scope, leaves.scope]);
  checkAllUsed("dtypes", dtypes.length, [tensors.dtype]);
  checkExtents(part);
  return part;
}

/** @param {ValueMap} members @param {number} referenceCount @param {number} boxCount */
function readGroups(members, referenceCount, boxCount) {
  const table = openTable(members, "groups", ["kind", "rule", "reference", "member_count", "box"]);
  const kind = table.strings("kind");
  const count = kind.length;
  if (kind.some((name) => name !== "adam" && name !== "cast" && name !== "sgd")) {
    badColumn("REQ-DEL-009", "a group is of an unknown kind");
  }
  const rule = table.blobs("rule", count);
  const reference = table.numbers("reference", count, referenceCount);
  const memberCount = table.numbers("member_count", count);
  const memberBegin = offsets(memberCount);
  const steps = unzigzag(table.numbers("box", memberBegin[count]));
  /** @type {number[][]} */
  const boxes = [];
  let box = 0;
  for (let row = 0; row < count; row += 1) {
    const own = [];
    for (let at = memberBegin[row]; at < memberBegin[row + 1]; at += 1) {
      box += steps[at];
      if (box < 0 || box >= boxCount) badColumn("REQ-IDX-002", "groups.box isn't a row of boxes");
      own.push(box);
    }
    boxes.push(own);
  }
  checkOrder("groups", count, (row) => {
    const [before, own] = [boxes[row - 1], boxes[row]];
    const at = own.findIndex((member, place) => before[place] !== member);
    return at < 0 ? before.length - own.length : at >= before.length ? -1 : before[at] - own[at];
  });
  return { count, kind, rule, reference, boxes };
}

/** @param {Uint8Array[]} trees @param {number} signedNbytes */
function checkTrees(trees, signedNbytes) {
  let nbytes = 0;
  for (const tree of trees) nbytes += tree.length;
  if (nbytes > Math.max(limits.TREES_NBYTES, limits.TREES_RATIO * signedNbytes)) {
    refuse("LIMIT_EXCEEDED", "REQ-DOC-030", "the trees of the part have too many bytes");
  }
  let items = 0;
  for (const tree of trees) {
    items += countTreeItems(tree, limits.TREES_ITEMS);
    if (items > limits.TREES_ITEMS) {
      refuse("LIMIT_EXCEEDED", "REQ-DOC-030", "the trees of the part have too many values");
    }
  }
}

/**
 * Compute shape, bytes and blocks of each box.
 *
 * @param {import("./tables.js").TensorRows} tensors @param {Numbers} tensorBoxes
 * @param {string[]} dtypes
 * @param {Numbers} begin
 * @param {Numbers} cutShape
 * @param {number} blockNbytes
 */
function placeBoxes(tensors, tensorBoxes, dtypes, begin, cutShape, blockNbytes) {
  const boxShape = new Float64Array(begin.length);
  const boxCount = offsets(tensorBoxes)[tensors.count];
  const boxTensor = new Float64Array(boxCount);
  const boxDims = new Float64Array(boxCount + 1);
  const boxNbytes = new Float64Array(boxCount);
  const boxBlocks = new Float64Array(boxCount);
  let box = 0;
  let at = 0;
  for (let row = 0; row < tensors.count; row += 1) {
    const ndim = tensors.ndim[row];
    const width = dtypeOf(dtypes[tensors.dtype[row]]).nbytes;
    for (let own = 0; own < tensorBoxes[row]; own += 1) {
      boxDims[box] = at;
      boxTensor[box] = row;
      for (let dim = 0; dim < ndim; dim += 1) {
        const whole = tensors.globalShape[tensors.dimBegin[row] + dim];
        const cut = cutShape[at];
        if (cut === whole + 1) {
          badColumn("REQ-PRT-013", "cut_shape states the whole extent of the tensor");
        }
        boxShape[at] = cut === 0 ? whole : cut - 1;
        if (begin[at] + boxShape[at] > whole) {
          refuse("BOX_BOUNDS", "REQ-PRT-004", "a box exceeds the bounds of its tensor");
        }
        at += 1;
      }
      boxNbytes[box] = product(boxShape.subarray(boxDims[box], at)) * width;
      boxBlocks[box] = Math.ceil(boxNbytes[box] / blockNbytes);
      box += 1;
    }
  }
  boxDims[boxCount] = at;
  return { boxShape, boxTensor, boxDims, boxNbytes, boxBlocks };
}

/**
 * Return the bytes of a block's content.
 *
 * @param {Part} part
 * @param {number} box
 * @param {number} block
 */
export const blockNbytes = (part, box, block) =>
  Math.min(part.origin.block_nbytes, part.boxNbytes[box] - block * part.origin.block_nbytes);

/**
 * List the extents of a box.
 *
 * @param {Part} part @param {number} box
 * @returns {number[]} their rows, ordered by their first blocks
 */
export function extentsOfBox(part, box) {
  if (part.rowsByBox === null) {
    /** @type {number[][]} */
    const rows = [];
    for (let row = 0; row < part.extents.count; row += 1) {
      (rows[part.extents.box[row]] ??= []).push(row);
    }
    const { blockBegin, blockCount } = part.extents;
    for (const own of rows) {
      own?.sort((a, b) => blockBegin[a] - blockBegin[b] || blockCount[a] - blockCount[b]);
    }
    part.rowsByBox = rows;
  }
  return part.rowsByBox[box] ?? [];
}

/** @param {Part} part */
function checkExtents(part) {
  const { extents, encodings, files, boxNbytes, boxBlocks, stored, references, groups } = part;
  const size = part.origin.block_nbytes;
  // Encodings that occur, and the rules of each extent alone.
  const used = new Set(extents.encoding);
  const occurring = encodings.filter((_, at) => used.has(at));
  const wanted = extents.count === 0 ? ["raw"] : occurring;
  if (wanted.length !== encodings.length || wanted.some((name, at) => name !== encodings[at])) {
    if (part.isDelta) badOrder("REQ-DEL-003", "encodings lists what doesn't occur");
  }
  checkGroups(part);
  for (let row = 0; row < extents.count; row += 1) {
    const encoding = encodings[extents.encoding[row]];
    const box = extents.box[row];
    const file = extents.file[row];
    const isNowhere = file === files.count;
    if (
      isNowhere !== (encoding === "same") ||
      (!isNowhere && encoding !== "raw" && files.kind[file] !== "pack")
    ) {
      badColumn("REQ-DEL-004", "a block is in a file of the wrong kind");
    }
    const predicted = extents.predicted[row] === 1;
    const needsBase = encoding === "same" || DELTA_ENCODINGS.has(encoding);
    const group = part.isDelta ? part.groupOf[box] : -1;
    if (
      (extents.reference[row] !== 0) !== (needsBase && !predicted) ||
      (encoding === "gradient" && !predicted) ||
      (predicted &&
        (group < 0 ||
          encoding === "same" ||
          !(needsBase || encoding === "gradient") ||
          (groups.kind[group] === "cast" && part.roleOf[box] === 0)))
    ) {
      badColumn("REQ-DEL-006", "a block has a base or a prediction without need, or lacks one");
    }
    const first = extents.blockBegin[row];
    const count = extents.blockCount[row];
    if (first + count > boxBlocks[box]) {
      refuse("EXTENT_COVERAGE", "REQ-PRT-006", "an extent has blocks that its box hasn't");
    }
    let nbytes = 0;
    if (encoding === "raw") {
      nbytes = count === 0 ? 0 : Math.min((first + count) * size, boxNbytes[box]) - first * size;
    } else if (encoding !== "same") {
      for (let k = 0; k < count; k += 1) {
        const storedNbytes = stored.nbytes[extents.storedBegin[row] + k];
        if (storedNbytes >= blockNbytes(part, box, first + k)) {
          badColumn("REQ-DEL-005", "an encoded block has as many bytes as its content");
        }
        nbytes += storedNbytes;
      }
    }
    extents.nbytes[row] = nbytes;
    if (row > 0) {
      const before = extents.file[row - 1];
      if (before > file) badOrder("REQ-IDX-003", "extents aren't sorted by file");
    }
    const keyTensor = part.tensors.name[part.boxTensor[box]];
    if (
      !isNowhere &&
      files.kind[file] === "safetensors" &&
      extents.key[row] === keyTensor &&
      keyTensor !== ""
    ) {
      badColumn("REQ-PRT-012", "a key that is the tensor's name is stored");
    }
  }
  placeExtents(part);
  checkCoverage(part);
  checkFiles(part);
  if (part.isDelta) checkFeatures(part, occurring, references.length);
  else if (part.features.some((name, at) => at > 0 && part.features[at - 1] >= name)) {
    badMember("REQ-DEL-001", "the features of the part aren't sorted");
  }
  checkFrozenFeature(part);
}

/** @param {Part} part */
function placeExtents({ extents, files }) {
  let at = 0;
  for (let row = 0; row < extents.count; row += 1) {
    const file = extents.file[row];
    const isNew = row === 0 || extents.file[row - 1] !== file;
    if (isNew) at = file < files.count ? files.headerNbytes[file] : 0;
    at += extents.gap[row];
    extents.byteBegin[row] = at;
    at += extents.nbytes[row];
    if (isNew || extents.byteBegin[row - 1] !== extents.byteBegin[row]) continue;
    // Extents that begin at one byte, and those of no file: by box, then by block.
    const order =
      extents.box[row - 1] - extents.box[row] ||
      (file === files.count ? extents.blockBegin[row - 1] - extents.blockBegin[row] : 0);
    if (extents.nbytes[row - 1] === 0 && order >= 0 && extents.nbytes[row] === 0) {
      badOrder("REQ-IDX-003", "extents aren't sorted by box");
    }
  }
}

/** @param {Part} part */
function checkCoverage(part) {
  const { extents } = part;
  for (let box = 0; box < part.boxCount; box += 1) {
    const rows = extentsOfBox(part, box);
    const blocks = part.boxBlocks[box];
    const isReplica = part.replica[box] === 1 && rows.length === 0 && part.digestCount[box] === 0;
    if (part.digestCount[box] !== blocks && !isReplica) {
      refuse("EXTENT_COVERAGE", "REQ-PRT-005", "a box hasn't a digest for each block");
    }
    if (rows.length === 0) continue;
    let next = 0;
    for (const row of rows) {
      if (extents.blockBegin[row] !== next || (extents.blockCount[row] === 0 && blocks > 0)) {
        refuse("EXTENT_COVERAGE", "REQ-PRT-006", "extents don't hold each block of a box once");
      }
      next += extents.blockCount[row];
    }
    if (next !== blocks || (blocks === 0 && rows.length > 1)) {
      refuse("EXTENT_COVERAGE", "REQ-PRT-006", "extents don't hold each block of a box once");
    }
  }
}

/** @param {Part} part */
function checkFiles({ extents, files }) {
  const sums = Float64Array.from(files.headerNbytes);
  for (let row = 0; row < extents.count; row += 1) {
    if (extents.gap[row] !== 0) {
      refuse("FILE_COVERAGE", "REQ-PRT-007", "there is a gap before an extent");
    }
    if (extents.file[row] < files.count) sums[extents.file[row]] += extents.nbytes[row];
  }
  for (let file = 0; file < files.count; file += 1) {
    if (sums[file] !== files.nbytes[file]) {
      refuse("FILE_COVERAGE", "REQ-PRT-007", `header and extents don't tile ${files.name[file]}`);
    }
  }
}

/** @param {Part} part */
function checkGroups(part) {
  const { groups } = part;
  for (let group = 0; group < groups.count; group += 1) {
    const boxes = groups.boxes[group];
    if (boxes.length < 2) badColumn("REQ-DEL-009", "a group has fewer than two boxes");
    const elements = (/** @type {number} */ box) =>
      product(part.boxShape.subarray(part.boxDims[box], part.boxDims[box + 1]));
    boxes.forEach((box, role) => {
      if (part.groupOf[box] >= 0) badColumn("REQ-DEL-009", "a box is in groups twice");
      if (extentsOfBox(part, box).length === 0 || elements(box) !== elements(boxes[0])) {
        badColumn("REQ-DEL-009", "the boxes of a group don't correspond, or aren't stored");
      }
      part.groupOf[box] = group;
      part.roleOf[box] = role;
    });
    if ((groups.reference[group] === 0) !== (groups.kind[group] === "cast")) {
      badColumn("REQ-DEL-010", "a group has a reference without need, or lacks one");
    }
  }
}

/** @param {Part} part @param {string[]} occurring @param {number} referenceCount */
function checkFeatures(part, occurring, referenceCount) {
  const encoded = occurring.filter((name) => name !== "raw");
  const wanted = new Set([
    ...(referenceCount + part.groups.count + encoded.length > 0 ? ["deltas"] : []),
    ...encoded.filter((name) => name !== "same"),
    ...part.groups.kind,
    ...part.features.filter((name) => FULL_FEATURES.has(name)),
  ]);
  const sorted = [...wanted].sort();
  if (
    sorted.length !== part.features.length ||
    sorted.some((name, at) => name !== part.features[at])
  ) {
    badMember("REQ-DEL-001", "the features of the part don't follow from its content");
  }
}

/** @param {string} name whether a leaf of weights is one of a frozen base */
export const isFrozenLeaf = (name) => name === "~frozen" || name.startsWith("~frozen/");

/** @param {Part} part */
function checkFrozenFeature(part) {
  const hasLeaf = part.leaves.name.some(
    (name, row) => part.leaves.field[row] === 0 && isFrozenLeaf(name),
  );
  if (hasLeaf !== part.features.includes("frozen")) {
    badMember("REQ-FRZ-001", "the feature frozen doesn't go with the leaves of a frozen base");
  }
}

/**
 * Find a tensor in a part.
 *
 * @param {Part} part @param {number} field @param {string} name @param {string} scope
 * @returns {number} its row, or -1
 */
export function findTensor(part, field, name, scope) {
  const { tensors, scopes } = part;
  if (part.rowByKey === null) {
    part.rowByKey = new Map();
    for (let row = 0; row < part.tensors.count; row += 1) {
      part.rowByKey.set(
        [tensors.field[row], scopes[tensors.scope[row]], tensors.name[row]].join(" "),
        row,
      );
    }
  }
  return part.rowByKey.get(`${field} ${scope} ${name}`) ?? -1;
}

/**
 * Find a box with extents among the boxes of a tensor.
 *
 * @param {Part} part @param {number} row of the tensor
 * @param {import("./boxes.js").Box} box
 * @returns {number} its row in `boxes`, or -1
 */
export function findBox(part, row, box) {
  for (let own = part.boxBegin[row]; own < part.boxBegin[row + 1]; own += 1) {
    const at = part.boxDims[own];
    if (
      box.every(
        ([begin, end], dim) =>
          part.begin[at + dim] === begin && part.boxShape[at + dim] === end - begin,
      ) &&
      extentsOfBox(part, own).length > 0
    )
      return own;
  }
  return -1;
}

/**
 * Return the digest of a block's content.
 *
 * @param {Part} part
 * @param {number} box
 * @param {number} block
 */
export function blockDigest(part, box, block) {
  const at = 32 * (part.digestBegin[box] + block);
  return part.digests.subarray(at, at + 32);
}
