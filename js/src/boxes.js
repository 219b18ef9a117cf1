// @ts-check
/** Boxes: half-open hyper-rectangles, and whether they tile a tensor (REQ-IDX-004). @module */
import { refuse } from "./errors.js";
import * as limits from "./limits.js";

/** A box: for each dimension `[begin, end]`, in elements. @typedef {[number, number][]} Box */

/** @param {ArrayLike<number>} extents @returns {bigint} */
export function exactProduct(extents) {
  let product = 1n;
  for (let at = 0; at < extents.length; at += 1) product *= BigInt(extents[at]);
  return product;
}

/** @param {ArrayLike<number>} extents @returns {number} */
export function product(extents) {
  let result = 1;
  for (let at = 0; at < extents.length; at += 1) result *= extents[at];
  return result;
}

/**
 * Check that boxes lie in a tensor and tile it.
 *
 * The test is exact: boxes tile the tensor exactly if their corners, each with the sign of its
 * parity, cancel to the corners of the tensor.
 *
 * @param {number[]} shape of the tensor
 * @param {number} count of boxes
 * @param {(box: number, dim: number) => number} beginOf
 * @param {(box: number, dim: number) => number} extentOf
 */
export function checkTiling(shape, count, beginOf, extentOf) {
  const ndim = shape.length;
  let total = 0n;
  /** @type {boolean[]} */
  const isCut = new Array(ndim).fill(false);
  /** @type {number[]} */
  const filled = [];
  for (let box = 0; box < count; box += 1) {
    let volume = 1n;
    for (let dim = 0; dim < ndim; dim += 1) {
      const begin = beginOf(box, dim);
      const extent = extentOf(box, dim);
      if (begin + extent > shape[dim]) {
        refuse("BOX_BOUNDS", "REQ-IDX-004", "a box exceeds the bounds of the tensor");
      }
      if (begin !== 0 || extent !== shape[dim]) isCut[dim] = true;
      volume *= BigInt(extent);
    }
    if (volume > 0n) filled.push(box);
    total += volume;
  }
  const wanted = exactProduct(shape);
  if (wanted > 0n && filled.length < count) {
    refuse("COLUMN_FORM", "REQ-IDX-004", "a tensor with elements has a box without elements");
  }
  const cut = isCut.flatMap((flag, dim) => (flag ? [dim] : []));
  if (cut.length > limits.SPLIT_NDIM) {
    refuse("LIMIT_EXCEEDED", "REQ-LIM-001", "a tensor is cut in too many dimensions");
  }
  if (count * 2 ** cut.length > limits.CORNERS) {
    refuse("LIMIT_EXCEEDED", "REQ-LIM-001", "the boxes of a tensor have too many corners");
  }
  if (total > wanted) refuse("TILING_OVERLAP", "REQ-IDX-004", "two boxes overlap");
  if (wanted === 0n) return;
  const isTiled =
    cut.length <= 1
      ? followEachOther(filled, cut[0] ?? 0, shape, beginOf, extentOf)
      : cornersCancel(filled, cut, shape, beginOf, extentOf);
  if (total === wanted && isTiled) return;
  if (total === wanted || overlaps(filled, cut, beginOf, extentOf)) {
    refuse("TILING_OVERLAP", "REQ-IDX-004", "two boxes overlap");
  }
  refuse("TILING_GAP", "REQ-IDX-004", "the boxes leave a part of the tensor uncovered");
}

/**
 * @param {number[]} boxes @param {number} dim @param {number[]} shape
 * @param {(box: number, dim: number) => number} beginOf
 * @param {(box: number, dim: number) => number} extentOf
 */
function followEachOther(boxes, dim, shape, beginOf, extentOf) {
  if (shape.length === 0) return boxes.length === 1;
  const sorted = boxes.slice().sort((a, b) => beginOf(a, dim) - beginOf(b, dim));
  let end = 0;
  for (const box of sorted) {
    if (beginOf(box, dim) !== end) return false;
    end += extentOf(box, dim);
  }
  return end === shape[dim];
}

/**
 * @param {number[]} boxes @param {number[]} cut @param {number[]} shape
 * @param {(box: number, dim: number) => number} beginOf
 * @param {(box: number, dim: number) => number} extentOf
 */
function cornersCancel(boxes, cut, shape, beginOf, extentOf) {
  /** @type {Map<string, number>} */
  const signs = new Map();
  /** @param {(dim: number) => number} begin @param {(dim: number) => number} extent
   *  @param {number} weight */
  const add = (begin, extent, weight) => {
    for (let corner = 0; corner < 2 ** cut.length; corner += 1) {
      let sign = weight;
      let key = "";
      for (let k = 0; k < cut.length; k += 1) {
        const isEnd = (corner >> k) & 1;
        if (isEnd) sign = -sign;
        key += `${begin(cut[k]) + (isEnd ? extent(cut[k]) : 0)},`;
      }
      const sum = (signs.get(key) ?? 0) + sign;
      if (sum === 0) signs.delete(key);
      else signs.set(key, sum);
    }
  };
  for (const box of boxes)
    add(
      (dim) => beginOf(box, dim),
      (dim) => extentOf(box, dim),
      1,
    );
  add(
    () => 0,
    (dim) => shape[dim],
    -1,
  );
  return signs.size === 0;
}

/**
 * Look for two boxes that overlap; only asked when something is wrong, and given up for many.
 *
 * @param {number[]} boxes @param {number[]} cut
 * @param {(box: number, dim: number) => number} beginOf
 * @param {(box: number, dim: number) => number} extentOf
 */
function overlaps(boxes, cut, beginOf, extentOf) {
  if (cut.length === 0) return boxes.length > 1;
  const sorted = boxes.slice().sort((a, b) => beginOf(a, cut[0]) - beginOf(b, cut[0]));
  let budget = 10_000_000;
  for (let k = 0; k < sorted.length; k += 1) {
    const end = beginOf(sorted[k], cut[0]) + extentOf(sorted[k], cut[0]);
    for (let j = k + 1; j < sorted.length && beginOf(sorted[j], cut[0]) < end; j += 1) {
      budget -= 1;
      if (budget < 0) return false;
      if (
        cut.every(
          (dim) =>
            beginOf(sorted[k], dim) < beginOf(sorted[j], dim) + extentOf(sorted[j], dim) &&
            beginOf(sorted[j], dim) < beginOf(sorted[k], dim) + extentOf(sorted[k], dim),
        )
      )
        return true;
    }
  }
  return false;
}

/**
 * Check a box that a caller asks for.
 *
 * @param {Box | undefined} box @param {number[]} shape
 * @returns {Box} the box, by default the whole tensor
 */
export function requireBox(box, shape) {
  if (box === undefined) return shape.map((extent) => [0, extent]);
  if (
    !Array.isArray(box) ||
    box.length !== shape.length ||
    !box.every(
      ([begin, end], dim) =>
        Number.isInteger(begin) &&
        Number.isInteger(end) &&
        begin >= 0 &&
        begin <= end &&
        end <= shape[dim],
    )
  ) {
    refuse("ARGUMENT", "", `the box ${JSON.stringify(box)} isn't within the shape [${shape}]`);
  }
  return box;
}

/**
 * Intersect two boxes.
 *
 * @param {Box} a @param {Box} b
 * @returns {Box | null} null if they have no element in common
 */
export function intersect(a, b) {
  /** @type {Box} */
  const common = [];
  for (let dim = 0; dim < a.length; dim += 1) {
    const begin = Math.max(a[dim][0], b[dim][0]);
    const end = Math.min(a[dim][1], b[dim][1]);
    if (begin >= end) return null;
    common.push([begin, end]);
  }
  return common;
}

/**
 * A run of consecutive elements that two boxes share.
 *
 * @typedef {object} Run
 * @property {number} from flat index of its first element in the source
 * @property {number} to flat index in the destination
 * @property {number} count of elements
 */

/**
 * List the runs of elements of a common box, in the order of the source.
 *
 * @param {Box} common @param {Box} source @param {Box} destination
 * @returns {Generator<Run>}
 */
export function* runsOf(common, source, destination) {
  const ndim = common.length;
  if (ndim === 0) {
    yield { from: 0, to: 0, count: 1 };
    return;
  }
  const widths = (/** @type {Box} */ box) => box.map(([begin, end]) => end - begin);
  const [sourceShape, destinationShape, shape] = [source, destination, common].map(widths);
  const strides = (/** @type {number[]} */ extents) => {
    const steps = new Array(ndim).fill(1);
    for (let dim = ndim - 2; dim >= 0; dim -= 1) steps[dim] = steps[dim + 1] * extents[dim + 1];
    return steps;
  };
  const sourceStrides = strides(sourceShape);
  const destinationStrides = strides(destinationShape);
  // Trailing dimensions that are whole in both belong to one run.
  let inner = ndim - 1;
  let count = shape[inner];
  while (
    inner > 0 &&
    shape[inner] === sourceShape[inner] &&
    shape[inner] === destinationShape[inner]
  ) {
    inner -= 1;
    count *= shape[inner];
  }
  const at = new Array(inner).fill(0);
  for (;;) {
    let from = 0;
    let to = 0;
    for (let dim = 0; dim < ndim; dim += 1) {
      const index = common[dim][0] + (dim < inner ? at[dim] : 0);
      from += (index - source[dim][0]) * sourceStrides[dim];
      to += (index - destination[dim][0]) * destinationStrides[dim];
    }
    yield { from, to, count };
    let dim = inner - 1;
    while (dim >= 0) {
      at[dim] += 1;
      if (at[dim] < shape[dim]) break;
      at[dim] = 0;
      dim -= 1;
    }
    if (dim < 0) return;
  }
}
