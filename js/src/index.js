// @ts-check
/**
 * ckptfmt: read, verify and list checkpoints of training runs, in Node and in browsers.
 *
 * @module
 */
export { openCheckpoint, Checkpoint, tensorKey } from "./checkpoint.js";
export { openRun, Run } from "./run.js";
export { CkptError } from "./errors.js";
export { readAhead } from "./sources/ahead.js";
export { memorySource } from "./sources/memory.js";
export { httpSource } from "./sources/http.js";
export { dropSource, fileListSource, handleSource } from "./sources/files.js";
export { toFloat32, DTYPES } from "./dtypes.js";
export { parseTree, toPlain, toTagged } from "./tree.js";
export { blake3, Blake3, loadBlake3 } from "./blake3.js";
export { FIELDS, FORMAT_VERSION, readerProfiles } from "./names.js";

/** @typedef {import("./sources/source.js").Source} Source */
/** @typedef {import("./sources/source.js").Stat} Stat */
/** @typedef {import("./sources/source.js").Entry} Entry */
/** @typedef {import("./sources/http.js").HttpOptions} HttpOptions */
/** @typedef {import("./checkpoint.js").OpenOptions} OpenOptions */
/** @typedef {import("./checkpoint.js").BasePlace} BasePlace */
/** @typedef {import("./checkpoint.js").TensorInfo} TensorInfo */
/** @typedef {import("./checkpoint.js").LeafInfo} LeafInfo */
/** @typedef {import("./checkpoint.js").StreamInfo} StreamInfo */
/** @typedef {import("./frozen.js").FrozenTensor} FrozenTensor */
/** @typedef {import("./boxes.js").Box} Box */
/** @typedef {import("./dtypes.js").Elements} Elements */
/** @typedef {import("./documents.js").Manifest} Manifest */
/** @typedef {import("./documents.js").LaunchRecord} LaunchRecord */
/** @typedef {import("./names.js").Field} Field */
/** @typedef {import("./run.js").CheckpointInfo} CheckpointInfo */
/** @typedef {import("./run.js").LaunchInfo} LaunchInfo */
/** @typedef {import("./run.js").Candidate} Candidate */
/** @typedef {import("./run.js").Choice} Choice */
/** @typedef {import("./run.js").Labels} Labels */
/** @typedef {import("./tree.js").Tree} Tree */
/** @typedef {import("./verify.js").Progress} Progress */
/** @typedef {import("./verify.js").Report} Report */
/** @typedef {import("./verify.js").VerifyOptions} VerifyOptions */
