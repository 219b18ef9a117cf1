// @ts-check
/** Where the launches and checkpoints of a run lie in a drawing. @module */

/** @typedef {{name: string, step: number, launch: number, state: string}} Mark */
/** @typedef {{launch: number, from: string | null}} Launch */

/**
 * Lay out a drawing: a lane for each launch, and checkpoints by their steps.
 *
 * Steps are even, so that a run with saves at irregular steps stays legible.
 *
 * @param {Launch[]} launches the oldest first
 * @param {Mark[]} marks
 * @param {{width: number, lane: number, left: number, right: number, top: number}} sizes
 */
export function layOut(launches, marks, { width, lane, left, right, top }) {
  const steps = marks.map(({ step }) => step);
  const least = Math.min(...steps);
  const greatest = Math.max(...steps);
  const span = Math.max(1, greatest - least);
  const xOf = (/** @type {number} */ step) =>
    left + ((step - least) / span) * (width - left - right);
  const rows = new Map(launches.map(({ launch }, at) => [launch, top + at * lane]));
  const byName = new Map(marks.map((mark) => [mark.name, mark]));
  const dots = marks.flatMap((mark) => {
    const y = rows.get(mark.launch);
    return y === undefined ? [] : [{ ...mark, x: xOf(mark.step), y }];
  });
  const lanes = launches.map(({ launch, from }) => {
    const own = dots.filter((dot) => dot.launch === launch);
    const base = from === null ? undefined : byName.get(from);
    const y = /** @type {number} */ (rows.get(launch));
    const begin = base === undefined ? (own[0]?.x ?? left) : xOf(base.step);
    const end = Math.max(begin, ...own.map(({ x }) => x));
    return { launch, y, begin, end, from: base && rows.has(base.launch) ? base : null };
  });
  const links = lanes.flatMap(({ launch, y, begin, from }) =>
    from === null
      ? []
      : [{ launch, x: begin, fromY: /** @type {number} */ (rows.get(from.launch)), toY: y }],
  );
  return {
    dots,
    lanes,
    links,
    ticks: ticksOf(least, greatest).map((step) => ({ step, x: xOf(step) })),
    height: top + launches.length * lane,
  };
}

/**
 * Return round steps between two steps, at most seven.
 *
 * @param {number} least @param {number} greatest
 * @returns {number[]}
 */
export function ticksOf(least, greatest) {
  if (!Number.isFinite(least)) return [];
  const span = greatest - least;
  if (span === 0) return [least];
  let size = 10 ** Math.floor(Math.log10(span / 5));
  for (const factor of [1, 2, 5, 10]) {
    if (span / (size * factor) <= 6) {
      size *= factor;
      break;
    }
  }
  size = Math.max(1, Math.round(size));
  const first = Math.ceil(least / size) * size;
  return Array.from(
    { length: Math.floor((greatest - first) / size) + 1 },
    (_, k) => first + k * size,
  );
}
