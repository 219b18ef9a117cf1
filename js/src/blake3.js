// @ts-check
/**
 * BLAKE3 (hash mode, 32 bytes of output).
 *
 * Four chunks are hashed at once by a WebAssembly function with 128-bit vectors. The function is
 * assembled here, instruction by instruction, when `loadBlake3` is called first; the package has no
 * binary file. Where WebAssembly or its vectors are missing, plain JavaScript computes the same.
 *
 * @module
 */

const CHUNK = 1024;
/** Bytes hashed into one subtree at once; the most that is copied into WebAssembly's memory. */
const PIECE = 1 << 20;
const IV = new Uint32Array([
  0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19,
]);
const PERMUTATION = [2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8];
/** Rows of the mixing function: its four words of state. */
const QUARTERS = [
  [0, 4, 8, 12],
  [1, 5, 9, 13],
  [2, 6, 10, 14],
  [3, 7, 11, 15],
  [0, 5, 10, 15],
  [1, 6, 11, 12],
  [2, 7, 8, 13],
  [3, 4, 9, 14],
];
const CHUNK_START = 1;
const CHUNK_END = 2;
const PARENT = 4;
const ROOT = 8;

/** For each of the seven rounds the order of the sixteen words of the message. */
const SCHEDULE = [[...Array(16).keys()]];
for (let round = 1; round < 7; round += 1) {
  const before = SCHEDULE[round - 1];
  SCHEDULE.push(PERMUTATION.map((place) => before[place]));
}

/* ---------------------------------------------------------------- the scalar compression ---- */

const state = new Uint32Array(16);
const message = new Uint32Array(16);

/** @param {number} a @param {number} b @param {number} c @param {number} d
 *  @param {number} x @param {number} y */
function mix(a, b, c, d, x, y) {
  let va = state[a],
    vb = state[b],
    vc = state[c],
    vd = state[d];
  va = (va + vb + x) | 0;
  vd ^= va;
  vd = (vd >>> 16) | (vd << 16);
  vc = (vc + vd) | 0;
  vb ^= vc;
  vb = (vb >>> 12) | (vb << 20);
  va = (va + vb + y) | 0;
  vd ^= va;
  vd = (vd >>> 8) | (vd << 24);
  vc = (vc + vd) | 0;
  vb ^= vc;
  vb = (vb >>> 7) | (vb << 25);
  state[a] = va;
  state[b] = vb;
  state[c] = vc;
  state[d] = vd;
}

/**
 * Compress the words in `message` into `cv`, in place.
 *
 * @param {Uint32Array} cv eight words
 * @param {number} counter number of the chunk; 0 for a parent
 * @param {number} nbytes bytes of the block, 0 to 64
 * @param {number} flags
 */
function compress(cv, counter, nbytes, flags) {
  state.set(cv, 0);
  state.set(IV.subarray(0, 4), 8);
  state[12] = counter >>> 0;
  state[13] = Math.floor(counter / 2 ** 32);
  state[14] = nbytes;
  state[15] = flags;
  for (const order of SCHEDULE) {
    for (let k = 0; k < 8; k += 1) {
      const [a, b, c, d] = QUARTERS[k];
      mix(a, b, c, d, message[order[2 * k]], message[order[2 * k + 1]]);
    }
  }
  for (let k = 0; k < 8; k += 1) cv[k] = state[k] ^ state[k + 8];
}

/** @param {Uint8Array} bytes at most 64 bytes, which become the message, filled up with zeros */
function loadMessage(bytes) {
  message.fill(0);
  for (let at = 0; at < bytes.length; at += 1) message[at >> 2] |= bytes[at] << (8 * (at & 3));
}

/**
 * Hash one chunk of at most 1024 bytes.
 *
 * @param {Uint8Array} bytes @param {number} counter @param {boolean} isRoot
 * @returns {Uint32Array} its chaining value
 */
function hashChunk(bytes, counter, isRoot) {
  const cv = IV.slice();
  for (let at = 0; at === 0 || at < bytes.length; at += 64) {
    const block = bytes.subarray(at, at + 64);
    const isLast = at + 64 >= bytes.length;
    loadMessage(block);
    const flags = (at === 0 ? CHUNK_START : 0) | (isLast ? CHUNK_END | (isRoot ? ROOT : 0) : 0);
    compress(cv, counter, block.length, flags);
  }
  return cv;
}

/** @param {Uint32Array} left @param {Uint32Array} right @param {boolean} isRoot */
function hashParent(left, right, isRoot) {
  const cv = IV.slice();
  message.set(left, 0);
  message.set(right, 8);
  compress(cv, 0, 64, PARENT | (isRoot ? ROOT : 0));
  return cv;
}

/* ------------------------------------------------------------ four at once, in WebAssembly ---- */

/** @param {number} number an unsigned integer, as LEB128 @returns {number[]} */
function leb(number) {
  const bytes = [];
  do {
    bytes.push((number & 127) | (number > 127 ? 128 : 0));
    number >>>= 7;
  } while (number);
  return bytes;
}

/** @param {number} number a signed integer of 32 bits, as LEB128 @returns {number[]} */
function signedLeb(number) {
  const bytes = [];
  for (;;) {
    const low = number & 127;
    number >>= 7;
    const isLast = (number === 0 && !(low & 64)) || (number === -1 && (low & 64) !== 0);
    bytes.push(low | (isLast ? 0 : 128));
    if (isLast) return bytes;
  }
}

/** @param {number} id @param {number[]} content a section of a module @returns {number[]} */
const section = (id, content) => [id, ...leb(content.length), ...content];

/**
 * Assemble the module: `hash4(input, stride, blocks, counter, counterHigh, isParent, output)`.
 *
 * `hash4` hashes four inputs, which begin `stride` bytes apart and have `blocks` blocks of 64 bytes
 * each: four chunks, with the numbers `counter` to `counter + 3`, or four parents. It writes the
 * four chaining values one after the other to `output`.
 *
 * @param {number} pageCount pages of memory, of 64 KiB each
 */
function assemble(pageCount) {
  // Parameters are locals 0 to 6; then integers, then the vectors of state, message and value.
  const [INPUT, STRIDE, BLOCKS, COUNTER, HIGH, IS_PARENT, OUTPUT] = [0, 1, 2, 3, 4, 5, 6];
  const [BLOCK, FLAGS, AT1, AT2, AT3] = [7, 8, 9, 10, 11];
  const [V, M, H, COUNTERS] = [12, 28, 44, 52];
  /** @type {number[]} */
  const code = [];
  const simd = (/** @type {number} */ op) => [0xfd, ...leb(op)];
  const get = (/** @type {number} */ local) => code.push(0x20, ...leb(local));
  const set = (/** @type {number} */ local) => code.push(0x21, ...leb(local));
  const i32 = (/** @type {number} */ value) => code.push(0x41, ...signedLeb(value | 0));
  const op = (/** @type {number[]} */ ...bytes) => code.push(...bytes);
  const [ADD, XOR, OR, SHL, SHR, SPLAT] = [0xae, 0x51, 0x50, 0xab, 0xad, 0x11].map(simd);
  const load = (/** @type {number} */ offset) => op(...simd(0x00), 2, ...leb(offset));
  const store = (/** @type {number} */ offset) => op(...simd(0x0b), 2, ...leb(offset));
  const shuffle = (/** @type {number[]} */ places) => op(...simd(0x0d), ...places);
  const words = (/** @type {number[]} */ places) =>
    shuffle(places.flatMap((word) => [0, 1, 2, 3].map((byte) => 4 * word + byte)));
  const splat = (/** @type {number} */ value) => {
    i32(value);
    op(...SPLAT);
  };

  /** Transpose four vectors: the words at one place of four rows become one vector. */
  const transpose = (/** @type {number[]} */ rows) => {
    const [a, b, c, d] = rows;
    const [low1, low2, high1, high2] = [V, V + 1, V + 2, V + 3];
    for (const [into, left, right, places] of /** @type {[number, number, number, number[]][]} */ ([
      [low1, a, b, [0, 4, 1, 5]],
      [low2, c, d, [0, 4, 1, 5]],
      [high1, a, b, [2, 6, 3, 7]],
      [high2, c, d, [2, 6, 3, 7]],
      [a, low1, low2, [0, 1, 4, 5]],
      [b, low1, low2, [2, 3, 6, 7]],
      [c, high1, high2, [0, 1, 4, 5]],
      [d, high1, high2, [2, 3, 6, 7]],
    ])) {
      get(left);
      get(right);
      words(places);
      set(into);
    }
  };
  /** Set `target` to the sum of itself, of `other` and of `more`. */
  const add = (/** @type {number} */ target, /** @type {number[]} */ ...others) => {
    get(target);
    for (const other of others) {
      get(other);
      op(...ADD);
    }
    set(target);
  };
  /** Set `target` to itself XOR `other`, rotated right by `bits`. */
  const rotate = (
    /** @type {number} */ target,
    /** @type {number} */ other,
    /** @type {number} */ bits,
  ) => {
    get(target);
    get(other);
    op(...XOR);
    set(target);
    if (bits === 16) {
      get(target);
      get(target);
      shuffle([...Array(16).keys()].map((at) => (at & ~3) + ((at + bits / 8) & 3)));
    } else {
      get(target);
      i32(bits);
      op(...SHR);
      get(target);
      i32(32 - bits);
      op(...SHL);
      op(...OR);
    }
    set(target);
  };

  for (let k = 0; k < 8; k += 1) {
    splat(IV[k]);
    set(H + k);
  }
  // The counters of four chunks; parents have the counter 0.
  get(COUNTER);
  op(...SPLAT);
  op(...simd(0x0c), 0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0);
  get(IS_PARENT);
  op(0x45);
  i32(-1);
  op(0x6c);
  op(...SPLAT); // all bits for chunks, none for parents
  op(...simd(0x4e), ...ADD);
  set(COUNTERS);
  i32(0);
  set(BLOCK);
  op(0x03, 0x40); // loop
  // Flags: CHUNK_START at the first block, CHUNK_END at the last; PARENT alone for parents.
  get(IS_PARENT);
  op(0x04, 0x7f);
  i32(PARENT);
  op(0x05);
  get(BLOCK);
  op(0x45);
  get(BLOCK);
  i32(1);
  op(0x6a);
  get(BLOCKS);
  op(0x46);
  i32(1);
  op(0x74);
  op(0x72);
  op(0x0b);
  set(FLAGS);
  get(INPUT);
  get(STRIDE);
  op(0x6a);
  set(AT1);
  get(AT1);
  get(STRIDE);
  op(0x6a);
  set(AT2);
  get(AT2);
  get(STRIDE);
  op(0x6a);
  set(AT3);
  for (let group = 0; group < 4; group += 1) {
    [INPUT, AT1, AT2, AT3].forEach((from, row) => {
      get(from);
      load(16 * group);
      set(M + 4 * group + row);
    });
    transpose([0, 1, 2, 3].map((row) => M + 4 * group + row));
  }
  for (let k = 0; k < 8; k += 1) {
    get(H + k);
    set(V + k);
  }
  for (let k = 0; k < 4; k += 1) {
    splat(IV[k]);
    set(V + 8 + k);
  }
  get(COUNTERS);
  set(V + 12);
  get(HIGH);
  op(...SPLAT);
  set(V + 13);
  splat(64);
  set(V + 14);
  get(FLAGS);
  op(...SPLAT);
  set(V + 15);
  for (const order of SCHEDULE) {
    QUARTERS.forEach(([qa, qb, qc, qd], k) => {
      const [a, b, c, d] = [V + qa, V + qb, V + qc, V + qd];
      add(a, b, M + order[2 * k]);
      rotate(d, a, 16);
      add(c, d);
      rotate(b, c, 12);
      add(a, b, M + order[2 * k + 1]);
      rotate(d, a, 8);
      add(c, d);
      rotate(b, c, 7);
    });
  }
  for (let k = 0; k < 8; k += 1) {
    get(V + k);
    get(V + 8 + k);
    op(...XOR);
    set(H + k);
  }
  get(INPUT);
  i32(64);
  op(0x6a);
  set(INPUT);
  get(BLOCK);
  i32(1);
  op(0x6a);
  set(BLOCK);
  get(BLOCK);
  get(BLOCKS);
  op(0x49, 0x0d, 0x00, 0x0b); // again while block < blocks
  for (const half of [0, 4]) {
    transpose([0, 1, 2, 3].map((row) => H + half + row));
    for (let lane = 0; lane < 4; lane += 1) {
      get(OUTPUT);
      get(H + half + lane);
      store(32 * lane + 4 * half);
    }
  }
  op(0x0b);

  const locals = [2, ...leb(5), 0x7f, ...leb(41), 0x7b];
  const body = [...locals, ...code];
  const name = (/** @type {string} */ text) => [text.length, ...new TextEncoder().encode(text)];
  return new Uint8Array([
    0x00,
    0x61,
    0x73,
    0x6d,
    0x01,
    0x00,
    0x00,
    0x00,
    ...section(1, [1, 0x60, 7, ...Array(7).fill(0x7f), 0]),
    ...section(3, [1, 0]),
    ...section(5, [1, 0x00, ...leb(pageCount)]),
    ...section(7, [2, ...name("m"), 0x02, 0, ...name("h"), 0x00, 0]),
    ...section(10, [1, ...leb(body.length), ...body]),
  ]);
}

/** Where a piece, and chaining values, lie in WebAssembly's memory. */
const CVS_AT = PIECE + 4 * CHUNK;
const PAGES = Math.ceil((CVS_AT + 32 * (PIECE / CHUNK) + 1024) / 65536);

/**
 * @typedef {(input: number, stride: number, blocks: number, counter: number, counterHigh: number,
 *   isParent: number, output: number) => void} Hash4
 */

/** @type {{hash4: Hash4, bytes: Uint8Array, words: Uint32Array} | null} */
let vectors = null;
/** @type {Promise<boolean> | null} */
let loading = null;

/**
 * Compile the WebAssembly function, once. Digests before that, or without WebAssembly, are slow.
 *
 * @returns {Promise<boolean>} whether WebAssembly with vectors is in use
 */
export function loadBlake3() {
  loading ??= (async () => {
    try {
      const { instance } = await WebAssembly.instantiate(assemble(PAGES));
      const { m, h } = /** @type {any} */ (instance.exports);
      vectors = { hash4: h, bytes: new Uint8Array(m.buffer), words: new Uint32Array(m.buffer) };
    } catch {
      vectors = null; // plain JavaScript computes the same digests
    }
    return vectors !== null;
  })();
  return loading;
}

/**
 * Hash at most `PIECE` bytes that form one subtree.
 *
 * @param {Uint8Array} bytes @param {number} counter number of its first chunk
 * @param {boolean} isRoot
 * @returns {Uint32Array}
 */
function hashSubtree(bytes, counter, isRoot) {
  const count = Math.max(1, Math.ceil(bytes.length / CHUNK));
  if (count === 1) return hashChunk(bytes, counter, isRoot);
  const full = Math.floor(bytes.length / CHUNK);
  /** @type {Uint32Array[]} */
  let cvs = [];
  if (vectors === null) {
    for (let k = 0; k < full; k += 1) {
      cvs.push(hashChunk(bytes.subarray(k * CHUNK, (k + 1) * CHUNK), counter + k, false));
    }
  } else {
    const { hash4, bytes: memory, words } = vectors;
    memory.set(bytes, 0);
    const high = Math.floor(counter / 2 ** 32);
    for (let k = 0; k < full; k += 4) {
      hash4(k * CHUNK, CHUNK, 16, (counter + k) | 0, high, 0, CVS_AT + 32 * k);
    }
    let left = full;
    if (full === count) {
      // Pairs become parents, layer by layer; the last value of an odd layer goes up as it is.
      while (left > 2) {
        const pairs = left >> 1;
        const odd =
          left & 1 ? words.slice((CVS_AT >> 2) + 8 * (left - 1), (CVS_AT >> 2) + 8 * left) : null;
        for (let k = 0; k < pairs; k += 4) {
          hash4(CVS_AT + 64 * k, 64, 1, 0, 0, 1, CVS_AT + 32 * k);
        }
        if (odd) words.set(odd, (CVS_AT >> 2) + 8 * pairs);
        left = pairs + (left & 1);
      }
    }
    for (let k = 0; k < left; k += 1) {
      cvs.push(words.slice((CVS_AT >> 2) + 8 * k, (CVS_AT >> 2) + 8 * (k + 1)));
    }
  }
  if (full < count) {
    cvs.push(hashChunk(bytes.subarray(full * CHUNK), counter + full, false));
  }
  while (cvs.length > 1) {
    const above = [];
    for (let k = 0; k + 1 < cvs.length; k += 2) {
      above.push(hashParent(cvs[k], cvs[k + 1], isRoot && cvs.length === 2));
    }
    if (cvs.length & 1) above.push(cvs[cvs.length - 1]);
    cvs = above;
  }
  return cvs[0];
}

/** Hash bytes that come in pieces. */
export class Blake3 {
  /** Bytes of the subtree that isn't complete yet. */
  #pending = new Uint8Array(0);
  #pendingNbytes = 0;
  /** @type {Uint32Array[]} */
  #stack = [];
  #pieceCount = 0;

  /** @param {Uint32Array} cv of a whole piece, after which more bytes follow */
  #push(cv) {
    this.#pieceCount += 1;
    for (let count = this.#pieceCount; (count & 1) === 0; count >>= 1) {
      cv = hashParent(/** @type {Uint32Array} */ (this.#stack.pop()), cv, false);
    }
    this.#stack.push(cv);
  }

  /**
   * Add bytes.
   *
   * @param {Uint8Array} bytes
   * @returns {this}
   */
  update(bytes) {
    let at = 0;
    while (at < bytes.length) {
      if (this.#pendingNbytes === PIECE) {
        this.#push(hashSubtree(this.#pending, (this.#pieceCount * PIECE) / CHUNK, false));
        this.#pendingNbytes = 0;
      }
      if (this.#pendingNbytes === 0 && bytes.length - at > PIECE) {
        const piece = bytes.subarray(at, at + PIECE);
        this.#push(hashSubtree(piece, (this.#pieceCount * PIECE) / CHUNK, false));
        at += PIECE;
        continue;
      }
      const count = Math.min(PIECE - this.#pendingNbytes, bytes.length - at);
      if (this.#pending.length < this.#pendingNbytes + count) {
        const wider = new Uint8Array(
          Math.min(PIECE, Math.max(2 * this.#pending.length, this.#pendingNbytes + count)),
        );
        wider.set(this.#pending.subarray(0, this.#pendingNbytes));
        this.#pending = wider;
      }
      this.#pending.set(bytes.subarray(at, at + count), this.#pendingNbytes);
      this.#pendingNbytes += count;
      at += count;
    }
    return this;
  }

  /** Return the digest of all bytes so far, 32 bytes. The object can't be used afterwards. */
  digest() {
    const rest = this.#pending.subarray(0, this.#pendingNbytes);
    let cv = hashSubtree(rest, (this.#pieceCount * PIECE) / CHUNK, this.#stack.length === 0);
    while (this.#stack.length > 0) {
      const left = /** @type {Uint32Array} */ (this.#stack.pop());
      cv = hashParent(left, cv, this.#stack.length === 0);
    }
    return wordsToBytes(cv);
  }
}

/** @param {Uint32Array} words @returns {Uint8Array} */
function wordsToBytes(words) {
  const bytes = new Uint8Array(4 * words.length);
  for (let at = 0; at < bytes.length; at += 1) bytes[at] = words[at >> 2] >>> (8 * (at & 3));
  return bytes;
}

/**
 * Return the BLAKE3-256 of bytes.
 *
 * @param {Uint8Array} bytes
 * @returns {Uint8Array} 32 bytes
 */
export function blake3(bytes) {
  if (bytes.length <= PIECE) return wordsToBytes(hashSubtree(bytes, 0, true));
  return new Blake3().update(bytes).digest();
}

/**
 * Return the extended BLAKE3 of a single block.
 *
 * @param {Uint8Array} bytes at most 64
 * @returns {Uint8Array} 64 bytes
 */
export function blake3Wide(bytes) {
  const words = new Uint32Array(16);
  words.set(hashChunk(bytes, 0, true));
  for (let k = 8; k < 16; k += 1) words[k] = state[k] ^ IV[k - 8];
  return wordsToBytes(words);
}
