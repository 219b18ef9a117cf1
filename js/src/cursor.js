// @ts-check
/**
 * The form of positions in the data: data cursors, and positions of other loaders (pages 60 to 62).
 *
 * Only what the leaf alone shows is checked; this package doesn't go on from a position.
 *
 * @module
 */
import { refuse } from "./errors.js";
import * as limits from "./limits.js";
import { placeOf } from "./positions.js";
import { utf8Length } from "./text.js";

/** @typedef {import("./tree.js").Tree} Tree */
/** A tree of dicts, lists, strings and integers: integers are BigInt. @typedef {any} Loose */

/** @param {string} clause @param {string} detail @returns {never} */
const malformed = (clause, detail) => refuse("CURSOR_FORM", clause, detail);

/** Return the tree with dicts as `Map`s and lists as arrays; other values stay. @param {Tree} tree
 *  @returns {Loose} */
function loosen(tree) {
  if (typeof tree === "number") return BigInt(tree);
  if (tree === null || typeof tree !== "object" || tree instanceof Uint8Array) return tree;
  if (tree.kind === "list") return tree.items.map(loosen);
  if (tree.kind !== "dict") return tree;
  return new Map(tree.entries.map(([key, value]) => [key, loosen(value)]));
}

/** @param {Loose} value @param {string} clause @param {string[]} names @param {string[]} [optional]
 *  @returns {Record<string, Loose>} */
function membersOf(value, clause, names, optional = []) {
  if (!(value instanceof Map)) return malformed(clause, "a member of the cursor isn't a dict");
  for (const name of names) {
    if (!value.has(name)) malformed(clause, `the member ${name} is missing`);
  }
  for (const key of value.keys()) {
    if (!names.includes(key) && !optional.includes(key)) {
      malformed(clause, `the member ${String(key)} is unknown`);
    }
  }
  return Object.fromEntries(value);
}

const U64 = 2n ** 64n;
const DIM = BigInt(limits.DIM);
const FAR = DIM * U64;

/** @param {Loose} value @param {bigint | number} least @param {bigint | number} most
 *  @param {string} what @returns {bigint} */
function integer(value, least, most, what) {
  if (typeof value !== "bigint" || value < least || value > most) {
    malformed("REQ-CUR-002", `${what} isn't an integer from ${least} to ${most}`);
  }
  return value;
}

/** @param {Loose} value @param {string} what @returns {string} */
function text(value, what) {
  if (typeof value !== "string" || utf8Length(value) > limits.NAME_NBYTES) {
    malformed("REQ-CUR-002", `${what} isn't a string, or is too long`);
  }
  return value;
}

/** @param {Loose} value @param {string} what @returns {Loose[]} */
function list(value, what) {
  return Array.isArray(value) ? value : malformed("REQ-CUR-002", `${what} isn't a list`);
}

/** Refuse what a later version may bring, before its members are checked (REQ-CUR-003).
 *  @param {Loose} value @param {string} path @param {string[]} known */
function known(value, path, known) {
  let at = value;
  for (const name of path.split(".")) {
    if (!(at instanceof Map)) return;
    at = at.get(name);
  }
  if (typeof at === "string" && !known.includes(at)) {
    refuse(
      "FEATURE_UNSUPPORTED",
      "REQ-CUR-003",
      `the cursor has ${path} ${JSON.stringify(at)}, ` + "which is unknown here",
    );
  }
}

const LEDGER = ["mix64-add4-v1"];

/** @param {Loose} cursor */
function checkKnown(cursor) {
  if (cursor.has("foreign")) {
    refuse("FEATURE_UNSUPPORTED", "REQ-CUR-003", "the cursor has the member foreign");
  }
  known(cursor, "plan.unit", ["sample"]);
  known(cursor, "plan.assign", ["contig-v1"]);
  known(cursor, "plan.tail", ["carry", "drop", "pad_masked"]);
  known(cursor, "order.alg", ["feistel-v1"]);
  known(cursor, "ledger.alg", LEDGER);
  known(cursor, "mixture.alg", ["block-det-v1"]);
  known(cursor, "pipeline.discarded.alg", LEDGER);
  const skips = cursor.get("skips");
  for (const skip of Array.isArray(skips) ? skips : []) {
    known(skip, "scope", ["sample", "shard", "pos"]);
    known(skip, "policy", ["hole", "mask", "shift"]);
  }
}

/** @param {Loose} value @param {string} what @returns {bigint} the count */
function ledger(value, what) {
  const {
    alg,
    count,
    set_digest: digest,
  } = membersOf(value, "REQ-CUR-002", ["alg", "count", "set_digest"]);
  if (!LEDGER.includes(alg)) malformed("REQ-CUR-002", `alg of ${what} isn't a string`);
  if (typeof digest !== "string" || !/^[0-9a-f]{64}$/.test(digest)) {
    malformed("REQ-CUR-002", `set_digest of ${what} isn't 64 digits`);
  }
  return integer(count, 0, FAR, `count of ${what}`);
}

/**
 * Check a data cursor.
 *
 * @param {Tree} tree
 * @throws {import("./errors.js").CkptError} `CURSOR_FORM`, `VERSION_UNSUPPORTED`,
 *   `FEATURE_UNSUPPORTED`
 */
export function checkCursor(tree) {
  const cursor = loosen(tree);
  if (!(cursor instanceof Map) || cursor.get("kind") !== "ckptfmt.data_cursor") {
    return malformed("REQ-CUR-001", "the value isn't of the kind ckptfmt.data_cursor");
  }
  checkVersion(cursor, "REQ-CUR-001");
  checkKnown(cursor);
  const isMixed = cursor.has("mixture");
  const clause = "REQ-CUR-002";
  const members = membersOf(
    cursor,
    clause,
    ["kind", "v", "plan", "commit", "order", "sources", "skips", "ledger"],
    ["mixture", "pipeline"],
  );
  const plan = membersOf(members.plan, clause, ["unit", "global_batch", "assign", "tail"]);
  for (const name of ["unit", "assign", "tail"]) text(plan[name], name);
  const batch = integer(plan.global_batch, 1, DIM, "global_batch");
  const positions = isMixed ? U64 - 1n : FAR;
  const commit = membersOf(
    members.commit,
    clause,
    isMixed ? ["step", "global_pos"] : ["step", "global_pos", "epoch", "pos_in_epoch"],
  );
  integer(commit.step, 0, U64 - 1n, "step");
  const position = integer(commit.global_pos, 0, positions, "global_pos");
  const order = membersOf(members.order, clause, ["alg", "seed", "vector_check"]);
  text(order.alg, "alg");
  integer(order.seed, 0, U64 - 1n, "seed");
  const check = membersOf(
    order.vector_check,
    clause,
    isMixed ? ["pos", "source", "id"] : ["pos", "id"],
  );
  integer(check.pos, 0, positions, "pos of vector_check");
  const sample = integer(check.id, 0, DIM, "id of vector_check");

  const entries = list(members.sources, "sources");
  if (entries.length === 0 || (!isMixed && entries.length > 1)) {
    malformed("REQ-CUR-009", "several sources have no mixture, or there is none");
  }
  /** @type {Map<string, {n: bigint, pos: bigint}>} */
  const sources = new Map();
  for (const entry of entries) {
    const source = membersOf(
      entry,
      clause,
      isMixed ? ["id", "fingerprint", "n", "pos"] : ["id", "fingerprint", "n"],
    );
    const id = text(source.id, "id of a source");
    if (source.fingerprint !== null) text(source.fingerprint, "fingerprint");
    if (sources.has(id)) malformed("REQ-CUR-009", "two sources have one id");
    const pos = isMixed ? integer(source.pos, 0, U64 - 1n, "pos of a source") : 0n;
    sources.set(id, { n: integer(source.n, 1, DIM, "n"), pos });
  }
  const skips = checkSkips(members.skips, sources, plan.tail, batch);
  const count = ledger(members.ledger, "ledger");
  if (count > position) malformed("REQ-CUR-021", "the ledger counts more samples than positions");
  if (plan.tail !== "carry" && isMixed)
    malformed("REQ-CUR-015", "a mixture has another tail than carry");
  if (isMixed) {
    checkMixture(members.mixture, sources);
    const sum = [...sources.values()].reduce((total, { pos }) => total + pos, 0n);
    const source = sources.get(text(check.source, "source of vector_check"));
    if (sum !== position || source === undefined || sample >= source.n) {
      malformed("REQ-CUR-010", "positions of sources, or vector_check, don't fit");
    }
  } else {
    const [{ n }] = [...sources.values()];
    const epoch = integer(commit.epoch, 0, U64 - 1n, "epoch");
    const within = integer(commit.pos_in_epoch, 0, FAR, "pos_in_epoch");
    const left = n - skips.removed;
    const length =
      plan.tail === "carry"
        ? n
        : plan.tail === "drop"
          ? (n / batch) * batch
          : ((n + batch - 1n) / batch) * batch;
    if (length < 1n || (plan.tail === "drop" && left < batch)) {
      malformed("REQ-CUR-015", "the tail leaves an epoch without a position");
    }
    if (sample >= n) malformed("REQ-CUR-004", "vector_check has a sample beyond the source");
    const own = { n, batch, tail: plan.tail, seed: order.seed };
    const place = placeOf(position, own, skips.shifts);
    if (place === null) {
      if (within >= length) malformed("REQ-CUR-004", "a position is beyond its epoch");
    } else if (place.epoch !== epoch || place.within !== within) {
      malformed("REQ-CUR-004", "global_pos isn't that of epoch and pos_in_epoch");
    }
  }
  const isExact = skips.count === 0 && plan.tail !== "pad_masked";
  if (!cursor.has("pipeline")) {
    if (isExact && count !== position) {
      malformed("REQ-CUR-004", "the ledger counts another number of samples than positions");
    }
    return undefined;
  }
  return checkPipeline(members.pipeline, position, count, isExact);
}

/** @param {Map<string, Loose>} value @param {string} clause */
function checkVersion(value, clause) {
  const version = value.get("v");
  if (typeof version !== "bigint") malformed(clause, "v isn't an integer");
  if (version !== 1n) {
    refuse(
      "VERSION_UNSUPPORTED",
      clause,
      `the value has version ${version}, which is unknown here`,
    );
  }
}

/** @param {Loose} value @param {bigint} position @param {bigint} count @param {boolean} isExact */
function checkPipeline(value, position, count, isExact) {
  const pipeline = membersOf(value, "REQ-CUR-002", ["open", "discarded"]);
  const open = list(pipeline.open, "open");
  let openCount = 0n;
  open.forEach((edge, at) => {
    if (
      typeof edge !== "bigint" ||
      edge < 0n ||
      edge > position ||
      (at > 0 && open[at - 1] >= edge)
    ) {
      malformed("REQ-PIP-001", "open isn't ascending positions");
    }
    openCount += at % 2 ? edge : -edge;
  });
  if (open.length % 2 || openCount > limits.OPEN_POSITIONS) {
    malformed("REQ-PIP-001", "open isn't pairs, or has too many positions");
  }
  const sum = openCount + count + ledger(pipeline.discarded, "discarded");
  if (sum > position || (isExact && sum !== position)) {
    malformed("REQ-PIP-002", "open, consumed and discarded positions don't add up");
  }
}

/** @param {Loose} value @param {Map<string, {n: bigint, pos: bigint}>} sources */
function checkMixture(value, sources) {
  const clause = "REQ-CUR-002";
  const mixture = membersOf(value, clause, ["alg", "block", "seed", "stages"]);
  text(mixture.alg, "alg");
  const block = integer(mixture.block, 1, limits.MIXTURE_BLOCK, "block");
  integer(mixture.seed, 0, U64 - 1n, "seed");
  const stages = list(mixture.stages, "stages");
  if (stages.length === 0) malformed("REQ-CUR-011", "there are no stages");
  let before = -1n;
  stages.forEach((entry, at) => {
    const stage = membersOf(entry, clause, ["from_pos", "counts"]);
    const from = integer(stage.from_pos, 0, U64 - 1n, "from_pos");
    if ((at === 0 && from !== 0n) || from <= before || from % block !== 0n) {
      malformed("REQ-CUR-011", "stages don't begin at ascending multiples of block");
    }
    before = from;
    if (
      !(stage.counts instanceof Map) ||
      stage.counts.size !== sources.size ||
      ![...stage.counts.keys()].every((id) => sources.has(id))
    ) {
      malformed("REQ-CUR-011", "a stage hasn't counts for exactly the sources");
    }
    let sum = 0n;
    for (const count of stage.counts.values())
      sum += integer(count, 0, limits.MIXTURE_BLOCK, "a count");
    if (sum !== block) malformed("REQ-CUR-011", "the counts of a stage don't add up to block");
  });
}

/**
 * @param {Loose} value @param {Map<string, {n: bigint, pos: bigint}>} sources
 * @param {string} tail @param {bigint} batch
 */
function checkSkips(value, sources, tail, batch) {
  const clause = "REQ-CUR-002";
  const skips = list(value, "skips");
  /** @type {import("./positions.js").Shift[]} */
  const shifts = [];
  /** @type {Map<string, [bigint, bigint][]>} ranges of samples removed from each source */
  const removed = new Map();
  for (const entry of skips) {
    const scope = entry instanceof Map ? entry.get("scope") : undefined;
    const own =
      scope === "sample"
        ? ["source", "ids", "from_pos"]
        : scope === "shard"
          ? ["source", "shard", "range", "from_pos"]
          : ["range"];
    const skip = membersOf(entry, clause, ["scope", "policy", "reason", ...own]);
    text(skip.scope, "scope");
    text(skip.policy, "policy");
    text(skip.reason, "reason");
    const isShift = skip.policy === "shift";
    /** @type {bigint[]} */
    let edges;
    /** @type {[bigint, bigint][]} */
    let ranges = [];
    if (scope === "pos") {
      edges = range(skip.range, FAR);
    } else {
      edges = [integer(skip.from_pos, 0, FAR, "from_pos")];
      const source = sources.get(text(skip.source, "source"));
      if (source === undefined) return malformed("REQ-CUR-017", "a skip is of an unknown source");
      if (scope === "shard") {
        text(skip.shard, "shard");
        const [begin, end] = range(skip.range, DIM);
        if (end > source.n) malformed("REQ-CUR-017", "the range of a shard exceeds the source");
        ranges = [[begin, end]];
      } else {
        const ids = list(skip.ids, "ids").map((id) => integer(id, 0, DIM, "an id"));
        if (
          ids.length === 0 ||
          ids.some((id, at) => id >= source.n || (at > 0 && ids[at - 1] >= id))
        ) {
          malformed("REQ-CUR-017", "ids don't ascend, or aren't samples of the source");
        }
        ranges = ids.map((id) => [id, id + 1n]);
      }
      if (isShift) removed.set(skip.source, [...(removed.get(skip.source) ?? []), ...ranges]);
    }
    if (isShift) {
      const [first, end = first] = edges;
      shifts.push({ first, ranges, draws: end - first });
    }
    if (isShift && tail !== "carry" && edges.some((edge) => edge % batch !== 0n)) {
      malformed("REQ-CUR-019", "a skip doesn't begin and end at multiples of global_batch");
    }
  }
  let most = 0n;
  for (const [id, ranges] of removed) {
    const n = /** @type {{n: bigint}} */ (sources.get(id)).n;
    let count = 0n;
    let end = 0n;
    for (const [from, to] of ranges.sort(([a], [b]) => (a < b ? -1 : a > b ? 1 : 0))) {
      if (to > end) count += to - (from > end ? from : end);
      if (to > end) end = to;
    }
    const left = n - count;
    if (count > limits.SKIPPED || left < 1n || (tail === "drop" && left < batch)) {
      malformed("REQ-CUR-019", "skips remove too many samples of a source");
    }
    most = count > most ? count : most;
  }
  return { count: skips.length, shifts, removed: most };
}

/** @param {Loose} value @param {bigint} most @returns {bigint[]} */
function range(value, most) {
  const edges = list(value, "range").map((edge) => integer(edge, 0, most, "an end of a range"));
  if (edges.length !== 2) malformed("REQ-CUR-002", "a range isn't two integers");
  if (edges[0] >= edges[1]) malformed("REQ-CUR-017", "a range is empty");
  return edges;
}

/** @param {Loose} value */
function checkForeign(value) {
  const clause = "REQ-CUR-022";
  checkVersion(value, clause);
  const loader = membersOf(value, clause, [
    "kind",
    "v",
    "lib",
    "version",
    "per",
    "worker_count",
    "state",
  ]);
  text(loader.lib, "lib");
  text(loader.version, "version");
  if (loader.per !== "worker" && loader.per !== "run")
    malformed(clause, "per is neither worker nor run");
  integer(loader.worker_count, 1, limits.WRITERS, "worker_count");
  if (loader.lib === "torch.utils.data") checkEpochs(loader);
}

/** @param {Record<string, Loose>} loader a position of torch's DataLoader (page 62) */
function checkEpochs({ per, state }) {
  const clause = "REQ-EPO-001";
  const wrong = (/** @type {string} */ what) => malformed(clause, `${what} has another type`);
  const count = (/** @type {Loose} */ value, /** @type {string} */ what) =>
    typeof value === "bigint" && value >= 0n ? value : wrong(what);
  const orNone = (/** @type {Loose} */ value, /** @type {string} */ what) =>
    value === null || count(value, what);
  const flag = (/** @type {Loose} */ value, /** @type {string} */ what) =>
    typeof value === "boolean" ? value : wrong(what);
  const seed = (/** @type {Loose} */ value) =>
    value === null || typeof value === "bigint" || wrong("seed");
  if (per !== "worker") malformed(clause, "per isn't worker");
  const members = membersOf(state, clause, [
    "sizes",
    "epoch",
    "batches",
    "attributes",
    "process_count",
    "draws",
    "streams",
    "seed",
    "current",
  ]);
  const sizes = membersOf(members.sizes, clause, [
    "samples",
    "batch_size",
    "batch_count",
    "drop_last",
    "sampler",
  ]);
  for (const name of ["samples", "batch_size", "batch_count"]) orNone(sizes[name], name);
  flag(sizes.drop_last, "drop_last");
  if (typeof sizes.sampler !== "string") wrong("sampler");
  count(members.epoch, "epoch");
  const batches = count(members.batches, "batches");
  if (
    !(members.attributes instanceof Map) ||
    ![...members.attributes.entries()].every(
      ([path, value]) =>
        typeof path === "string" &&
        (value === null || typeof value !== "object" || value.kind === "float"),
    )
  )
    wrong("attributes");
  const processes = count(members.process_count, "process_count");
  flag(members.draws, "draws");
  seed(members.seed);
  if (!Array.isArray(members.streams)) wrong("streams");
  const streams = (/** @type {Loose} */ value, /** @type {string} */ what) => {
    if (!Array.isArray(value)) wrong(what);
    for (const entry of value) {
      const stream = membersOf(entry, clause, ["name", "kind", "state"]);
      if (
        typeof stream.name !== "string" ||
        typeof stream.kind !== "string" ||
        !(stream.state instanceof Uint8Array)
      )
        wrong(what);
    }
  };
  for (const entry of members.streams) if (entry !== null) streams(entry, "streams");
  if (BigInt(members.streams.length) !== processes) {
    malformed("REQ-EPO-002", "streams hasn't an entry for each worker process");
  }
  if (members.current === null) {
    if (batches > 0n) malformed("REQ-EPO-002", "there are batches without a current epoch");
    return;
  }
  const current = membersOf(members.current, clause, [
    "begin",
    "first",
    "redrawn",
    "ahead",
    "is_drawn",
    "seed",
    "digest",
  ]);
  streams(current.begin, "begin");
  if (current.first !== null) streams(current.first, "first");
  if (
    !Array.isArray(current.redrawn) ||
    !current.redrawn.every((/** @type {Loose} */ name) => typeof name === "string")
  )
    wrong("redrawn");
  if (current.ahead !== null && !Array.isArray(current.ahead)) wrong("ahead");
  flag(current.is_drawn, "is_drawn");
  seed(current.seed);
  if (
    current.digest !== null &&
    !(typeof current.digest === "string" && /^[0-9a-f]{64}$/.test(current.digest))
  )
    wrong("digest");
  if (batches > 0n && current.first === null)
    malformed("REQ-EPO-002", "there are batches without first");
  if ((current.ahead !== null) !== current.redrawn.length > 0) {
    malformed("REQ-EPO-002", "ahead and redrawn contradict each other");
  }
}

/**
 * Check a value of the field `data`, if it is a position of a kind that the specification has.
 *
 * @param {Tree} tree
 */
export function checkPosition(tree) {
  const value = loosen(tree);
  if (!(value instanceof Map)) return;
  if (value.get("kind") === "ckptfmt.data_cursor") checkCursor(tree);
  if (value.get("kind") === "ckptfmt.foreign_loader") checkForeign(value);
}
