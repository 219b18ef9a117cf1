// @ts-check
/** The window of a tensor that the page shows as a grid. @module */

/** @typedef {[number, number][]} Box */
/**
 * What a grid shows: an index of each leading dimension, and the first row and column.
 *
 * @typedef {{lead: number[], row: number, column: number}} Position
 */

export const ROWS = 24;
export const COLUMNS = 8;

/**
 * Return rows and columns of the grid: a vector is cut into rows.
 *
 * @param {number[]} shape
 */
export function gridOf(shape) {
  if (shape.length === 0) return { rows: 1, columns: 1, isVector: false };
  const last = shape[shape.length - 1];
  if (shape.length === 1) {
    return { rows: Math.ceil(last / COLUMNS), columns: Math.min(last, COLUMNS), isVector: true };
  }
  return { rows: shape[shape.length - 2], columns: last, isVector: false };
}

/**
 * Return a position moved into the bounds of a shape.
 *
 * @param {number[]} shape @param {Position} wanted
 * @returns {Position}
 */
export function clampPosition(shape, { lead, row, column }) {
  const { rows, columns } = gridOf(shape);
  const clamp = (/** @type {number} */ value, /** @type {number} */ most) =>
    Math.max(0, Math.min(Number.isFinite(value) ? Math.floor(value) : 0, most));
  return {
    lead: shape.slice(0, -2).map((extent, dim) => clamp(lead[dim] ?? 0, extent - 1)),
    row: clamp(row, rows - 1),
    column: clamp(column, columns - 1),
  };
}

/**
 * Return the box of a window, and the number of its columns.
 *
 * @param {number[]} shape @param {Position} position within the bounds
 * @returns {{box: Box, rows: number, columns: number}}
 */
export function windowOf(shape, { lead, row, column }) {
  const { rows, columns, isVector } = gridOf(shape);
  if (shape.length === 0) return { box: [], rows: 1, columns: 1 };
  if (isVector) {
    const begin = row * COLUMNS;
    const end = Math.min(begin + ROWS * COLUMNS, shape[0]);
    return { box: [[begin, end]], rows: Math.ceil((end - begin) / COLUMNS), columns };
  }
  const lastRow = Math.min(row + ROWS, rows);
  const lastColumn = Math.min(column + COLUMNS, columns);
  return {
    box: [
      ...lead.map((index) => /** @type {[number, number]} */ ([index, index + 1])),
      [row, lastRow],
      [column, lastColumn],
    ],
    rows: lastRow - row,
    columns: lastColumn - column,
  };
}
