// @ts-check
/** A source for a long pass: reads that follow each other take bytes from a stream. @module */
import { CHUNK_NBYTES } from "../reading.js";

/** @typedef {import("./source.js").Source} Source */
/**
 * A file that is being read: the end of its last read, and the stream from there on.
 *
 * @typedef {object} Track
 * @property {number} expected
 * @property {Promise<ReadableStreamBYOBReader | null> | null} stream
 * @property {Promise<unknown>} last the last read of the stream
 */

/** Shorter reads never begin a stream. */
const LEAST_NBYTES = 1024 * 1024;
/** Files with a stream: a delta is read beside its bases. */
const MOST_FILES = 3;
const MOST_SPARE = 4;

/**
 * Read files of a browser or of a web server as streams, where reads follow each other.
 *
 * A stream spares a request for each read, and fills buffers that were released: reads take half
 * of the processor time in Chromium. A source without streams is returned as it is.
 *
 * @param {Source} source
 * @returns {Source}
 */
export function readAhead(source) {
  const { stream: streamOf } = source;
  if (streamOf === undefined) return source;
  let isSupported = true;
  /** @type {Map<string, Track>} */
  const tracks = new Map();
  /** @type {WeakSet<ArrayBufferLike>} buffers of reads that aren't released */
  const own = new WeakSet();
  /** @type {ArrayBuffer[]} */
  const spare = [];

  /** @param {Track} track */
  const close = (track) => {
    const { stream, last } = track;
    track.stream = null;
    if (stream === null) return;
    const cancel = async () => (await stream)?.cancel();
    last.then(cancel).catch(() => {}); // a stream that has failed is closed
  };

  /** @param {string} path */
  const trackOf = (path) => {
    const track = tracks.get(path) ?? { expected: -1, stream: null, last: Promise.resolve() };
    tracks.delete(path);
    tracks.set(path, track);
    for (const [oldest, old] of tracks) {
      if (tracks.size <= MOST_FILES) break;
      close(old);
      tracks.delete(oldest);
    }
    return track;
  };

  /** @param {string} path @param {number} begin @param {AbortSignal} [signal] */
  const open = async (path, begin, signal) => {
    const stream = await streamOf(path, begin, signal);
    try {
      return stream.getReader({ mode: "byob" });
    } catch {
      isSupported = false; // an older browser, whose streams bring their own buffers
      await stream.cancel();
      return null;
    }
  };

  /**
   * @param {ReadableStreamBYOBReader} reader @param {number} nbytes
   * @returns {Promise<Uint8Array | null>} null if the stream ends early
   */
  const fill = async (reader, nbytes) => {
    const at = spare.findIndex(({ byteLength }) => byteLength >= nbytes);
    let buffer = at < 0 ? new ArrayBuffer(Math.max(nbytes, CHUNK_NBYTES)) : spare.splice(at, 1)[0];
    for (let count = 0; count < nbytes;) {
      const view = new Uint8Array(buffer, count, nbytes - count);
      // @ts-expect-error: `min` is newer than the types; where it is unknown, reads are shorter.
      const { value } = await reader.read(view, { min: view.length });
      if (value === undefined || value.length === 0) return null;
      count += value.length;
      ({ buffer } = value);
    }
    own.add(buffer);
    return new Uint8Array(buffer, 0, nbytes);
  };

  return {
    ...source,
    async read(path, begin, end, signal) {
      const track = trackOf(path);
      const nbytes = end - begin;
      const follows = track.expected === begin;
      track.expected = end;
      if (!follows) close(track);
      if (!follows || !isSupported || (track.stream === null && nbytes < LEAST_NBYTES)) {
        return source.read(path, begin, end, signal);
      }
      track.stream ??= open(path, begin, signal).catch(() => null);
      const { stream, last } = track;
      const filling = last.then(async () => {
        const reader = await stream;
        return reader && fill(reader, nbytes);
      });
      track.last = filling.catch(() => {});
      const bytes = await filling.catch(() => null);
      if (bytes !== null) return bytes;
      // A single read says what is wrong, if anything is.
      if (track.stream === stream) close(track);
      return source.read(path, begin, end, signal);
    },
    release(bytes) {
      if (own.delete(bytes.buffer) && spare.length < MOST_SPARE) {
        spare.push(/** @type {ArrayBuffer} */ (bytes.buffer));
      }
    },
  };
}
