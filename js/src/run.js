// @ts-check
/** Runs: launches, lineage, and the checkpoint to resume from (page 20). @module */
import { loadBlake3 } from "./blake3.js";
import { checkPlace, openCheckpoint } from "./checkpoint.js";
import {
  parseLabels,
  parseLabelsName,
  parseLaunchFile,
  parseRegister,
  parseRun,
} from "./documents.js";
import { CkptError, locatedAsync, refuse } from "./errors.js";
import * as limits from "./limits.js";
import { join, parseCheckpointName, parseRecordName } from "./names.js";
import { readSmall } from "./reading.js";

/** @typedef {import("./sources/source.js").Source} Source */
/** @typedef {import("./names.js").Integer} Integer */
/** @typedef {import("./documents.js").Manifest} Manifest */
/** @typedef {import("./documents.js").LaunchRecord} LaunchRecord */

/**
 * A checkpoint directory of a run, and what its register holds.
 *
 * @typedef {object} CheckpointInfo
 * @property {string} name
 * @property {Integer} step
 * @property {Integer} launch
 * @property {"committed" | "retired" | "aborted" | "undecided" | "unreadable"} state
 * @property {Manifest | null} manifest of a committed checkpoint
 * @property {string | null} digest of a committed checkpoint
 * @property {CkptError | null} error why the register is unreadable
 */
/**
 * A launch of a run.
 *
 * @typedef {object} LaunchInfo
 * @property {Integer} launch
 * @property {LaunchRecord | null} record null if it is unreadable
 * @property {CkptError | null} error why
 */
/**
 * An entry of the list of candidates.
 *
 * @typedef {object} Candidate
 * @property {string | null} name of the directory; null for the record of a launch
 * @property {CheckpointInfo | null} checkpoint null if the directory doesn't exist
 * @property {string | null} wanted the digest that a record names, if one does
 * @property {LaunchInfo | null} launch an unreadable record that stands in the list
 * @property {boolean} isSuspect a checkpoint that would be a candidate without the mark `suspect`;
 *   the run doesn't go on from it by itself
 */
/**
 * Labels of a checkpoint.
 *
 * @typedef {object} Labels
 * @property {boolean} isPinned
 * @property {Record<string, string>} metrics
 * @property {string[]} tags
 */
/**
 * What the next launch by lineage would do.
 *
 * @typedef {object} Choice
 * @property {string | null} resumeFrom directory of the checkpoint, null for a fresh start
 * @property {string | null} digest of its manifest
 * @property {"lineage" | "fallback"} chosenBy
 * @property {PassedOver[]} passedOver what stands before it in the list of candidates
 */
/**
 * A checkpoint or launch record that a choice passes over: damaged, or suspect.
 *
 * @typedef {object} PassedOver
 * @property {string | null} name of the directory; null for the record of a launch
 * @property {CkptError | null} error the damage; null for a suspect checkpoint
 */

/** @param {Integer} a @param {Integer} b */
const compareIntegers = (a, b) => (a < b ? -1 : a > b ? 1 : 0);
/** @param {Integer} a @param {Integer} b */
const isEqual = (a, b) => compareIntegers(a, b) === 0;

/**
 * Open a run: `run.json`, the records of launches, and the registers of all checkpoints.
 *
 * @param {Source} source @param {string} [path] the run's directory
 * @param {{signal?: AbortSignal}} [options]
 * @returns {Promise<Run>}
 */
export async function openRun(source, path = "", { signal } = {}) {
  await loadBlake3();
  const runPath = join(path, "run.json");
  return locatedAsync(runPath, "open", async () => {
    const bytes = await readSmall(source, runPath, limits.JSON_NBYTES, signal);
    const launches = (await source.list(join(path, "launches"), signal)).filter(
      ({ name }) => parseRecordName(name) !== null,
    );
    if (bytes === null) {
      const entries = await source.list(path, signal);
      if (launches.length > 0 || entries.some(({ name }) => parseCheckpointName(name) !== null)) {
        refuse("FILE_MISSING", "REQ-RUN-015", "there are checkpoints or launches, and no run.json");
      }
      return refuse("NOT_COMMITTED", "REQ-RUN-006", "there is no run here", path || ".");
    }
    const { run_id: runId, features } = parseRun(bytes);
    const run = new Run(source, path, runId, features);
    for (const { name } of launches) run.launches.push(await readLaunch(run, name, signal));
    run.launches.sort((a, b) => compareIntegers(a.launch, b.launch));
    await run.refresh(signal);
    return run;
  });
}

/**
 * @param {Run} run
 * @param {string} name
 * @param {AbortSignal} [signal]
 * @returns {Promise<LaunchInfo>}
 */
async function readLaunch(run, name, signal) {
  const launch = /** @type {Integer} */ (parseRecordName(name));
  const path = join(run.path, `launches/${name}`);
  try {
    const bytes = await readSmall(run.source, path, limits.JSON_NBYTES, signal);
    if (bytes === null) return refuse("FILE_MISSING", "REQ-CKP-004", "the record is gone", path);
    return { launch, record: parseLaunchFile(bytes, "launch", name, run.runId), error: null };
  } catch (error) {
    if (!(error instanceof CkptError) || error.kind === "StoreError") throw error;
    return { launch, record: null, error: error.at(path, "open") };
  }
}

/** A run that was opened. */
export class Run {
  /** @param {Source} source @param {string} path @param {string} runId
   *  @param {import("./documents.js").Features} features */
  constructor(source, path, runId, features) {
    this.source = source;
    /** The run's directory. */
    this.path = path;
    this.runId = runId;
    this.features = features;
    /** @type {LaunchInfo[]} all launches, the oldest first */
    this.launches = [];
    /** @type {CheckpointInfo[]} all checkpoint directories, by step and launch */
    this.checkpoints = [];
  }

  /**
   * Read the registers of all checkpoint directories (REQ-RUN-014).
   *
   * Registers are read in the order of their steps; where one was found retired, the names are
   * listed again, and new and undecided directories are read.
   *
   * @param {AbortSignal} [signal]
   */
  async refresh(signal) {
    /** @type {Map<string, CheckpointInfo>} */
    const known = new Map();
    for (let isFirst = true, again = true; again; isFirst = false) {
      const entries = await this.source.list(this.path, signal);
      const names = entries.flatMap(({ name, kind }) => {
        const parsed = parseCheckpointName(name);
        return parsed === null ? [] : [{ name, kind, ...parsed }];
      });
      const fresh = names
        .filter(({ name }) => {
          const state = known.get(name)?.state;
          return state === undefined || state === "undecided";
        })
        .sort((a, b) => compareIntegers(a.step, b.step) || compareIntegers(a.launch, b.launch));
      let foundRetired = false;
      let foundNew = false;
      for (const { name, kind, step, launch } of fresh) {
        signal?.throwIfAborted();
        foundNew ||= !known.has(name);
        const info = await this.#readRegister(name, kind, step, launch, signal);
        foundRetired ||= info.state === "retired";
        known.set(name, info);
      }
      again = foundRetired && (isFirst || foundNew);
    }
    this.checkpoints = [...known.values()].sort(
      (a, b) => compareIntegers(a.step, b.step) || compareIntegers(a.launch, b.launch),
    );
  }

  /** @param {string} name @param {string} kind @param {Integer} step @param {Integer} launch
   *  @param {AbortSignal} [signal] @returns {Promise<CheckpointInfo>} */
  async #readRegister(name, kind, step, launch, signal) {
    /** @type {CheckpointInfo} */
    const info = {
      name,
      step,
      launch,
      state: "undecided",
      manifest: null,
      digest: null,
      error: null,
    };
    const path = join(this.path, name);
    try {
      if (kind !== "folder") {
        throw new CkptError("UNSAFE_FILE", "a link or file has the name of a checkpoint", {
          clause: "REQ-CKP-002",
          where: path,
        });
      }
      const bytes = await readSmall(
        this.source,
        join(path, "manifest.json"),
        limits.MANIFEST_NBYTES,
        signal,
      );
      if (bytes === null) return info;
      const { content, digest } = parseRegister(bytes);
      checkPlace(content, path, this.runId);
      if (content.type === "manifest") {
        return { ...info, state: "committed", manifest: content, digest };
      }
      return { ...info, state: content.type === "abort" ? "aborted" : "retired" };
    } catch (error) {
      if (!(error instanceof CkptError) || error.kind === "StoreError") throw error;
      return { ...info, state: "unreadable", error: error.at(join(path, "manifest.json"), "open") };
    }
  }

  /** @param {string} name */
  #find(name) {
    return this.checkpoints.find((own) => own.name === name) ?? null;
  }

  /** @param {Integer} launch */
  #ofLaunch(launch) {
    return this.checkpoints.filter((own) => isEqual(own.launch, launch));
  }

  /**
   * Whether a clean-up retired the checkpoint of a launch before it could see the launch.
   *
   * @param {LaunchInfo} info
   */
  isOvertaken({ launch, record }) {
    if (record === null || record.resume_from === null || record.chosen_by === "hand") return false;
    return (
      this.#find(record.resume_from.name)?.state === "retired" &&
      !this.#ofLaunch(launch).some(({ state }) => DECIDED.has(state))
    );
  }

  /**
   * List the candidates: the checkpoints from which the run goes on, the first one first; and in
   * their places the suspect ones, from which it doesn't.
   *
   * @returns {Candidate[]}
   */
  candidates() {
    this.#requireRecords();
    // A record of another run isn't damage: the folder was put together from two runs.
    const strange = this.launches.find(
      ({ error }) => error?.code === "RUN_MISMATCH" && error.clause === "REQ-RUN-003",
    );
    if (strange) throw /** @type {CkptError} */ (strange.error);
    /** @type {Candidate[]} */
    const candidates = [];
    const newestOf = (/** @type {(info: LaunchInfo) => boolean} */ isWanted) =>
      this.launches.findLast((info) => isWanted(info) && !this.isOvertaken(info)) ?? null;
    let current = newestOf(() => true);
    /** @type {Integer} */
    let bound = Infinity;
    /** @type {import("./documents.js").Reference | null} R, where step 3 led here from it */
    let named = null;
    const seen = new Set();
    while (current !== null && !seen.has(String(current.launch))) {
      const { launch, record } = current;
      seen.add(String(launch));
      for (const own of this.#ofLaunch(launch).reverse()) {
        if (own.step > bound || (own.state !== "committed" && own.state !== "unreadable")) continue;
        const isNamed = named !== null && named.name === own.name;
        candidates.push({
          name: own.name,
          checkpoint: own,
          wanted: isNamed ? (named?.digest ?? null) : null,
          launch: null,
          isSuspect: own.manifest?.suspect !== undefined && !isNamed,
        });
      }
      if (record === null) {
        const older = this.checkpoints.some((own) => own.launch < launch && DECIDED.has(own.state));
        if (!older) break;
        candidates.push({
          name: null,
          checkpoint: null,
          wanted: null,
          launch: current,
          isSuspect: false,
        });
        const [least] = this.#ofLaunch(launch);
        bound = least === undefined ? Infinity : least.step;
        named = null;
        current = newestOf((info) => info.launch < launch);
        continue;
      }
      named = record.resume_from;
      if (named === null) break;
      const found = this.#find(named.name);
      const parsed = /** @type {{step: Integer, launch: Integer}} */ (
        parseCheckpointName(named.name)
      );
      bound = parsed.step;
      if (
        found === null ||
        found.state === "aborted" ||
        found.state === "undecided" ||
        (found.state === "committed" && found.digest !== named.digest)
      ) {
        candidates.push({
          name: named.name,
          checkpoint: found,
          wanted: named.digest,
          launch: null,
          isSuspect: false,
        });
        bound = typeof bound === "bigint" ? bound - 1n : bound - 1;
      }
      current = this.launches.find((info) => isEqual(info.launch, parsed.launch)) ?? null;
    }
    return candidates;
  }

  /** Refuse a run with a checkpoint of a launch without a record (REQ-RUN-015). */
  #requireRecords() {
    for (const { name, launch } of this.checkpoints) {
      if (!this.launches.some((info) => isEqual(info.launch, launch))) {
        throw new CkptError(
          "FILE_MISSING",
          `the checkpoint ${name} is of launch ${launch}, which has ` + "no record",
          { clause: "REQ-RUN-015", where: join(this.path, "launches"), phase: "open" },
        );
      }
    }
  }

  /**
   * Return the launches of the run's lineage: the newest launch that isn't overtaken, the launch of
   * the checkpoint that it resumed from, and so on.
   *
   * @returns {{launch: Integer, from: string | null}[]} with the checkpoint each one resumed from
   */
  lineage() {
    /** @type {{launch: Integer, from: string | null}[]} */
    const line = [];
    let current = this.launches.findLast((info) => !this.isOvertaken(info)) ?? null;
    while (current !== null && !line.some(({ launch }) => launch === current?.launch)) {
      const from = current.record?.resume_from?.name ?? null;
      line.push({ launch: current.launch, from });
      const parsed = from === null ? null : parseCheckpointName(from);
      current =
        parsed === null
          ? null
          : (this.launches.find((info) => isEqual(info.launch, parsed.launch)) ?? null);
    }
    return line;
  }

  /**
   * Open a checkpoint of the run.
   *
   * @param {string} [name] by default the first candidate (REQ-RUN-020)
   * @param {import("./checkpoint.js").OpenOptions} [options]
   * @returns {Promise<import("./checkpoint.js").Checkpoint>}
   */
  async open(name, options = {}) {
    if (name !== undefined) return openCheckpoint(this.source, join(this.path, name), options);
    const candidates = this.candidates();
    const first = candidates.find(({ isSuspect }) => !isSuspect);
    if (first === undefined) {
      throw new CkptError("NOT_COMMITTED", "the run has no checkpoint to go on from", {
        clause: "REQ-RUN-006",
        where: this.path || ".",
        phase: "open",
      });
    }
    return this.#openCandidate(first, options);
  }

  /** @param {Candidate} candidate @param {import("./checkpoint.js").OpenOptions} [options] */
  async #openCandidate({ name, checkpoint: info, wanted, launch }, options = {}) {
    const known = launch?.error ?? info?.error;
    if (known) throw known;
    // A launch that named the checkpoint decides, as a caller does, by its digest.
    return openCheckpoint(
      this.source,
      join(this.path, /** @type {string} */ (name)),
      wanted === null ? options : { ...options, digest: wanted },
    );
  }

  /**
   * Refuse to begin anew where the run has gone on from something (REQ-RUN-010).
   *
   * @param {Candidate[]} suspects
   */
  #refuseFreshStart(suspects) {
    const newest = this.launches[this.launches.length - 1];
    if (newest?.record?.resume_from || suspects.length > 0) {
      throw new CkptError(
        "NO_VALID_CHECKPOINT",
        suspects.length > 0
          ? `only suspect checkpoints are left: ${suspects.map(({ name }) => name).join(", ")}`
          : "the newest launch went on from a checkpoint, and there is no candidate any more",
        {
          clause: "REQ-RUN-010",
          where: this.path || ".",
          phase: "open",
        },
      );
    }
  }

  /**
   * Choose the checkpoint from which the next launch by lineage resumes.
   *
   * Each candidate is verified, byte by byte, until one is whole.
   *
   * @param {import("./verify.js").VerifyOptions & {bases?: import("./checkpoint.js").BasePlace[]}
   *   } [options]
   * @returns {Promise<Choice>}
   * @throws {CkptError} `NO_VALID_CHECKPOINT`; and where a candidate's only fault is an unknown
   *   version or feature, this fault (REQ-VER-010)
   */
  async chooseNext({ bases, ...options } = {}) {
    const candidates = this.candidates();
    if (candidates.every(({ isSuspect }) => isSuspect)) {
      this.#refuseFreshStart(candidates);
      return { resumeFrom: null, digest: null, chosenBy: "lineage", passedOver: [] };
    }
    /** @type {PassedOver[]} */
    const passedOver = [];
    for (const candidate of candidates) {
      if (candidate.isSuspect) {
        passedOver.push({ name: candidate.name, error: null });
        continue;
      }
      try {
        const checkpoint = await this.#openCandidate(candidate, { bases, signal: options.signal });
        await requireWhole(checkpoint, options);
        return {
          resumeFrom: candidate.name,
          digest: checkpoint.digest,
          chosenBy: passedOver.some(({ error }) => error !== null) ? "fallback" : "lineage",
          passedOver,
        };
      } catch (error) {
        if (
          !(error instanceof CkptError) ||
          error.kind === "StoreError" ||
          error.kind === "UnsupportedError"
        )
          throw error;
        passedOver.push({ name: candidate.name, error });
      }
    }
    throw new CkptError(
      "NO_VALID_CHECKPOINT",
      "no checkpoint in the lineage is whole: " +
        passedOver
          .map(({ name, error }) => `${name ?? "a launch record"} (${error?.code ?? "suspect"})`)
          .join(", "),
      {
        clause: "REQ-RUN-010",
        where: this.path || ".",
        phase: "open",
      },
    );
  }

  /**
   * Return the labels of all checkpoints that have a record of labels.
   *
   * The record with the greatest number counts. A record that can't be read counts as a pin.
   *
   * @param {AbortSignal} [signal]
   * @returns {Promise<Map<string, Labels>>} by the name of the checkpoint; a checkpoint without a
   *   record has the metrics and tags of its manifest, and isn't pinned
   */
  async labels(signal) {
    /** @type {Map<string, {number: number, file: string}>} */
    const newest = new Map();
    for (const { name: file } of await this.source.list(join(this.path, "labels"), signal)) {
      const named = parseLabelsName(file);
      if (named !== null && named.number > (newest.get(named.checkpoint)?.number ?? 0)) {
        newest.set(named.checkpoint, { number: named.number, file });
      }
    }
    /** @type {Map<string, Labels>} */
    const labels = new Map();
    for (const [checkpoint, { file }] of newest) {
      try {
        const path = join(this.path, `labels/${file}`);
        const bytes = await readSmall(this.source, path, limits.JSON_NBYTES, signal);
        if (bytes === null) refuse("FILE_MISSING", "REQ-RUN-026", "the record is gone", path);
        const { pinned, metrics, tags } = parseLabels(bytes, file, this.runId);
        labels.set(checkpoint, { isPinned: pinned, metrics, tags });
      } catch (error) {
        if (!(error instanceof CkptError)) throw error;
        labels.set(checkpoint, { isPinned: true, metrics: {}, tags: [] });
      }
    }
    return labels;
  }
}

/**
 * Refuse a checkpoint that isn't whole. An unknown version or feature is named only where it is the
 * only fault: otherwise the checkpoint is damaged (REQ-VER-010).
 *
 * @param {import("./checkpoint.js").Checkpoint} checkpoint
 * @param {import("./verify.js").VerifyOptions} options
 */
async function requireWhole(checkpoint, options) {
  try {
    await checkpoint.verify({ ...options, failFast: true });
  } catch (error) {
    if (!(error instanceof CkptError) || error.kind !== "UnsupportedError") throw error;
    const { problems } = await checkpoint.verify({ signal: options.signal });
    throw problems.find(({ kind }) => kind !== "UnsupportedError") ?? error;
  }
}

/** States that count as content of a launch. */
const DECIDED = new Set(["committed", "retired", "unreadable"]);
