// Attention of one query token a sequence over its paged keys and values, in one launch.
// Axes: rows n in [0, num_rows), kv heads h in [0, kv_heads), q heads h * group + g, keys t, columns d.
//   out[n, h * group + g, d] = sum_t p[t] * v[t, d],  p = softmax over t of cap(scale * (q[n, h * group + g] . k[t]))
//   t in [max(0, lengths[n] - window), lengths[n]); a sink adds exp(sinks[head]) to the sum of the softmax.
// With `starts` a row sees keys from starts[n] on; where that is not 0, its softmax goes to `states`, not finished, for
// paged_cascade to join with that of the keys before.
// Units: strides of query and out in elements; page_bytes of K and V of a page, head_bytes of one head's K (or V).
// Work: a *tile* is 16 keys of one pair (n, h).  The tiles of all pairs, rows in order, heads inside a row, lie on one
// line that every block derives from `lengths` and cuts into equal *pieces*, a warp taking an equal part of its block's
// piece.  A warp streams its tiles through a ring of its own in shared memory (cp.async, no block barrier) and computes
// S^T = K Q^T and O^T += V^T P^T with the group's heads as the 8 columns of mma.m16n8k16.  What a warp holds of a pair
// that others hold parts of is merged in order of the line: inside the block through shared memory, between blocks
// through float partials in `workspace` by the block that arrives last (flash decoding, Dao et al. 2023).
// A warp has few instructions in flight, so what counts besides bytes is the number of instructions a tile.
#include "mma.cuh"
#include "types.cuh"

namespace edgellm {

struct PagedDecodeParams {
  const void* query;
  const void* pages;
  const int* page_table;
  const int* slots;
  const int* lengths;
  const float* sinks;  // or null
  const int* starts;   // multiples of 16, or null; without a window
  void* out;
  float* states;    // (num_rows, kv_heads * group, D + 4), where there are starts
  void* workspace;  // int arrived[gridDim.x], zero before and after; then two partials a block
  i64 query_stride;
  i64 out_stride;
  i64 page_bytes;
  i64 head_bytes;
  int num_rows;
  int kv_heads;
  int group;
  int page_shift;  // log2 of the page size
  int pages_per_slot;
  int window;       // 0: none
  int stages;       // 2, 3, 4 or 6 tiles in a warp's ring
  int align_tiles;  // by how many tiles a piece may be longer so that it ends with a pair
  int early_reads;  // 0: nothing is read before the launch in front has ended
  float score_scale;  // to powers of two without a cap: scale * log2(e); with one: scale / cap
  float cap;          // 0: none; otherwise cap * log2(e)
};

constexpr int kTileKeys = 16;
constexpr int kMaxWarps = 8;
constexpr int kMinTiles = 8;  // a block that gets fewer costs more in merging than it saves in reading
constexpr float kLog2E = 1.4426950408889634f;

template <typename KV, int kHeadDim>
struct TileShape {
  static constexpr bool kFp8 = sizeof(KV) == 1;
  static constexpr int kRowBytes = kHeadDim * static_cast<int>(sizeof(KV));
  static constexpr int kChunks = kRowBytes / 16;  // 16-byte pieces of a row
  static constexpr int kBytes = kTileKeys * kRowBytes;
  static constexpr int kScaleBytes = !kFp8 ? 0 : kRowBytes > 128 ? kRowBytes : 128;  // 16 of K, 16 of V, unused
  static constexpr int kStageBytes = 2 * kBytes + kScaleBytes;
  static constexpr int kCopies = kBytes / (16 * kWarp);  // of 16 bytes, by each lane, for K and as many for V
  static constexpr int kRowsACopy = kChunks < kWarp ? kWarp / kChunks : 1;
  static_assert(kStageBytes % kRowBytes == 0, "addresses of a row differ in their low bits only");

  // Chunks of a row are permuted so that the same chunk of 8 neighbouring rows lies in 8 different banks.
  static __device__ __forceinline__ constexpr int swizzle(int row) {
    return 16 * (kChunks >= 8 ? row & 7 : (row >> 1) & 3);
  }
};

// 2^x within 2 units in the last place; 0 for results below the normal floats.
__device__ __forceinline__ float power_of_two(float x) {
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
}

// a / b for a >= 0, b > 0; unsigned is a third shorter.
__device__ __forceinline__ int quotient(int a, int b) {
  return static_cast<int>(static_cast<u32>(a) / static_cast<u32>(b));
}

// ---- the line of tiles ---------------------------------------------------------------------------------------------

struct Range {
  int begin;
  int end;

  __device__ __forceinline__ bool holds(const Range& other) const { return begin <= other.begin && other.end <= end; }
};

// How the line is cut into pieces for blocks: into runs of `run` tiles (the last may be shorter), those into `parts`
// of `each` tiles, the first `longer` of them one longer.  One run is the whole line, or where all pairs are equally
// long, one or several pairs, so that pieces end with pairs.
struct Cut {
  int total;
  int run;
  int parts;
  int each;
  int longer;

  // Past the last block: empty, at the end of the line.
  __device__ __forceinline__ Range piece(int block) const {
    const int before = quotient(block, parts), part = block - before * parts, base = before * run;
    return {min(total, base + part * each + min(part, longer)),
            min(total, base + (part + 1) * each + min(part + 1, longer))};
  }
  // The block that has `tile`.
  __device__ __forceinline__ int block_of(int tile) const {
    const int before = quotient(tile, run), rest = tile - before * run, border = longer * (each + 1);
    const bool in_longer = rest < border;
    const int part = quotient(in_longer ? rest : rest - border, in_longer ? each + 1 : each);
    return before * parts + part + (in_longer ? 0 : longer);
  }
};

// `tiles`: of every pair where all have as many, otherwise 0.
__device__ __forceinline__ Cut make_cut(const PagedDecodeParams& p, int total, int tiles, int pairs) {
  const int grid = gridDim.x;
  int run = max(1, total), parts = max(1, min(grid, total / kMinTiles));
  if (tiles > 0) {
    const bool few = pairs <= grid;
    const int ratio = quotient(few ? grid : pairs + grid - 1, few ? pairs : grid);
    const int pair_run = few ? tiles : tiles * ratio, pair_parts = few ? min(max(1, tiles / kMinTiles), ratio) : 1;
    const int longest = quotient(pair_run + pair_parts - 1, pair_parts);
    if (static_cast<i64>(longest - p.align_tiles) * parts <= total) {
      run = pair_run;
      parts = pair_parts;
    }
  }
  const int each = quotient(run, parts);
  return {total, run, parts, each, run - each * parts};
}

// A row and one of its kv heads, with tiles [first, end) of keys counted from the sequence's start.
struct Pair {
  int row;
  int head;
  int slot;
  int length;
  int first;
  int end;
};

// Reads a row's bounds; end == first for padding rows, which have no tiles.
__device__ __forceinline__ void read_row(const PagedDecodeParams& p, int row, Pair& pair) {
  pair.row = row;
  pair.slot = p.slots[row];
  pair.length = p.lengths[row];
  pair.first = p.window > 0 ? max(0, pair.length - p.window) >> 4 : p.starts != nullptr ? p.starts[row] >> 4 : 0;
  pair.end = pair.slot < 0 ? pair.first : max(pair.first, (pair.length + kTileKeys - 1) >> 4);
}
static_assert(kTileKeys == 16, "shifts by 4");

__device__ __forceinline__ void next_pair(const PagedDecodeParams& p, Pair& pair) {
  if (++pair.head < p.kv_heads) return;
  pair.head = 0;
#pragma unroll 1
  do read_row(p, pair.row + 1, pair);
  while (pair.end == pair.first && pair.row + 1 < p.num_rows);
}

// What this warp does: its tiles on the line and the block's.
struct Piece {
  Cut cut;
  Range block;
  Range warp;
};

// Lane i counts rows [i * chunk, (i + 1) * chunk), chunk = ceil(num_rows / 32); one scan over the lanes.  `rows` is
// where those lie on the line.
__device__ __forceinline__ Piece cut_line(const PagedDecodeParams& p, int warp, int warps, int lane, Range& rows) {
  const int chunk = ceil_div(p.num_rows, kWarp), first = lane * chunk;
  int sum = 0, count = 0, most = 0, fewest = 0x7fffffff;
#pragma unroll 1
  for (int row = first; row < min(first + chunk, p.num_rows); ++row) {
    Pair pair;
    read_row(p, row, pair);
    const int tiles = pair.end - pair.first;
    if (tiles == 0) continue;
    sum += tiles * p.kv_heads;
    most = max(most, tiles);
    fewest = min(fewest, tiles);
    ++count;
  }
  rows.end = sum;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const int before = __shfl_up_sync(kFullMask, rows.end, step);
    if (lane >= step) rows.end += before;
  }
  rows.begin = rows.end - sum;
  most = __reduce_max_sync(kFullMask, most);
  fewest = __reduce_min_sync(kFullMask, fewest);
  const int pairs = __reduce_add_sync(kFullMask, count) * p.kv_heads;
  Piece piece;
  piece.cut = make_cut(p, __shfl_sync(kFullMask, rows.end, kWarp - 1), most == fewest ? most : 0, pairs);
  piece.block = piece.cut.piece(blockIdx.x);
  const int length = piece.block.end - piece.block.begin, each = quotient(length, warps);
  const int longer = length - each * warps;
  piece.warp.begin = piece.block.begin + warp * each + min(warp, longer);
  piece.warp.end = piece.warp.begin + each + (warp < longer);
  return piece;
}

// The pair that holds tile `begin` of the line; `tile` is that tile, counted from the sequence's start.
__device__ __forceinline__ Pair find_pair(const PagedDecodeParams& p, int begin, const Range& rows, int& tile) {
  const int owner = __ffs(static_cast<int>(__ballot_sync(kFullMask, rows.begin <= begin && begin < rows.end))) - 1;
  int next = __shfl_sync(kFullMask, rows.begin, owner), base = next, row = owner * ceil_div(p.num_rows, kWarp);
  Pair pair;
#pragma unroll 1
  do {
    base = next;
    read_row(p, row++, pair);
    next = base + p.kv_heads * (pair.end - pair.first);
  } while (begin >= next);
  const int tiles = pair.end - pair.first;
  pair.head = quotient(begin - base, tiles);
  tile = pair.first + begin - base - pair.head * tiles;
  return pair;
}

// ---- copies into the ring ------------------------------------------------------------------------------------------

// Where the next tile comes from.  A lane holds the page id of page `base` + lane of the row, and of 32 pages further.
struct Source {
  Pair* pair;      // in shared memory, the same for all lanes
  const u8* keys;  // of the pair's head in page 0, this lane's 16 bytes
  int tile;
  int end;   // of the pair's tiles
  int high;  // keys of the row from the tile's first on
  int base;
  int ids;
  int next_ids;
  int left;  // tiles to copy yet
};

__device__ __forceinline__ int page_of(const PagedDecodeParams& p, int tile) {
  return tile * kTileKeys >> p.page_shift;
}

__device__ __forceinline__ int read_page_ids(const PagedDecodeParams& p, const Pair& pair, int base, int lane) {
  const int index = base + lane;
  if (index << p.page_shift >= pair.length) return 0;
  return __ldg(p.page_table + static_cast<i64>(pair.slot) * p.pages_per_slot + index);
}

// Every lane writes the same; nobody may still read what was there.
__device__ __forceinline__ void replace_pair(Pair* place, const Pair& pair) {
  __syncwarp();
  *place = pair;
  __syncwarp();
}

// Points the source at a tile of a pair; page ids are read unless `same_pages`.
__device__ __forceinline__ void start_source(const PagedDecodeParams& p, Source& source, const Pair& pair, int tile,
                                             bool same_pages, int lane) {
  replace_pair(source.pair, pair);
  source.keys = static_cast<const u8*>(p.pages) + pair.head * p.head_bytes + 16 * lane;
  source.tile = tile;
  source.end = pair.end;
  source.high = pair.length - tile * kTileKeys;
  if (same_pages) return;
  source.base = page_of(p, tile);
  source.ids = read_page_ids(p, pair, source.base, lane);
  source.next_ids = read_page_ids(p, pair, source.base + kWarp, lane);
}

// To the next tile of the line; there is one.
__device__ __forceinline__ void step_source(const PagedDecodeParams& p, Source& source, int lane) {
  source.high -= kTileKeys;
  if (++source.tile < source.end) {
    if (page_of(p, source.tile) < source.base + kWarp) return;
    source.base += kWarp;
    source.ids = source.next_ids;
    source.next_ids = read_page_ids(p, *source.pair, source.base + kWarp, lane);
    return;
  }
  Pair pair = *source.pair;
  const int row = pair.row;
  next_pair(p, pair);
  start_source(p, source, pair, pair.first, pair.row == row && source.base == page_of(p, pair.first), lane);
}

template <int kTarget, int kSource>
__device__ __forceinline__ void cp_async_at(u32 target, const u8* source) {
  asm volatile("cp.async.cg.shared.global [%0 + %2], [%1 + %3], 16;" ::"r"(target), "l"(source), "n"(kTarget),
               "n"(kSource)
               : "memory");
}

// Whole rows of K and V, coalesced.
template <typename Shape, int kCopy = 0>
__device__ __forceinline__ void copy_whole(u32 place, const u8* keys, const u8* values) {
  if constexpr (kCopy < Shape::kCopies) {
    constexpr int kOffset = kCopy * 16 * kWarp;
    const u32 target = place ^ Shape::swizzle(kCopy * Shape::kRowsACopy);
    cp_async_at<kOffset, kOffset>(target, keys);
    cp_async_at<kOffset + Shape::kBytes, kOffset>(target, values);
    copy_whole<Shape, kCopy + 1>(place, keys, values);
  }
}

// As copy_whole, but keys outside [low, high) become zeros, so that stale bits meet no arithmetic.
template <typename Shape>
__device__ __noinline__ void copy_masked(u32 place, const u8* keys, const u8* values, int low, int high, int lane) {
#pragma unroll 1
  for (int i = 0; i < Shape::kCopies; ++i) {
    const int key = lane / Shape::kChunks + i * Shape::kRowsACopy, offset = i * 16 * kWarp;
    const u32 target = (place ^ Shape::swizzle(i * Shape::kRowsACopy)) + offset;
    cp_async_16_or_zero(target, keys + offset, low <= key && key < high);
    cp_async_16_or_zero(target + Shape::kBytes, values + offset, low <= key && key < high);
  }
}

// Whether the row sees all keys of a tile; `high` as in Source.
__device__ __forceinline__ bool sees_all(const PagedDecodeParams& p, int high) {
  return high >= kTileKeys && (p.window == 0 || high <= p.window);
}

// Starts the copies of the source's tile into a stage and steps on; `place` is where this lane's go.
template <typename Shape>
__device__ __forceinline__ void copy_tile(const PagedDecodeParams& p, Source& source, u32 place, u32 stage,
                                          int lane) {
  const int key = source.tile * kTileKeys, index = key >> p.page_shift, in_page = key - (index << p.page_shift);
  const i64 page = __shfl_sync(kFullMask, source.ids, index - source.base);
  const u8* block = source.keys + page * p.page_bytes;
  const u8* keys = block + in_page * Shape::kRowBytes;
  const u8* values = keys + p.page_bytes / 2;
  if (sees_all(p, source.high))
    copy_whole<Shape>(place, keys, values);
  else
    copy_masked<Shape>(place, keys, values, p.window > 0 ? source.high - p.window : 0, source.high, lane);
  if constexpr (Shape::kFp8) {
    const u8* scales = block + (Shape::kRowBytes << p.page_shift) + in_page * 4;
    if (lane < 4) cp_async_16(stage + 2 * Shape::kBytes + 16 * lane, scales);
    if (lane < 4) cp_async_16(stage + 2 * Shape::kBytes + 64 + 16 * lane, scales + p.page_bytes / 2);
  }
  if (--source.left > 0) step_source(p, source, lane);
}

__device__ __forceinline__ void wait_for_oldest(int stages) {
  if (stages == 3)
    cp_async_wait<2>();
  else if (stages == 2)
    cp_async_wait<1>();
  else if (stages == 4)
    cp_async_wait<3>();
  else
    cp_async_wait<5>();
}

// Where this lane reads and writes in a stage; kept in registers, because computing them anew costs more.
struct LaneOffsets {
  u32 copies;
  u32 keys;
  u32 values;
};

template <typename Shape>
__device__ __forceinline__ LaneOffsets lane_offsets(int lane) {
  const int row = lane / Shape::kChunks, key = lane & 15, value = (lane & 7) + (lane >> 4) * 8;
  LaneOffsets at;
  at.copies = row * Shape::kRowBytes + ((16 * (lane % Shape::kChunks)) ^ Shape::swizzle(row));
  at.keys = key * Shape::kRowBytes + ((16 * (lane >> 4)) ^ Shape::swizzle(key));
  at.values = Shape::kBytes + value * Shape::kRowBytes + ((16 * ((lane >> 3) & 1)) ^ Shape::swizzle(value));
  asm volatile("" : "+r"(at.copies), "+r"(at.keys), "+r"(at.values));
  return at;
}

// ---- one tile ------------------------------------------------------------------------------------------------------

__device__ __forceinline__ u32 transpose_8x8(u32 pair) {
  u32 out;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(pair));
  return out;
}

// Bytes 0 and 2 (or 1 and 3) of four e4m3 values as two T.  For f16 the values are 2^-8 of what they are: exact for all
// e4m3, and the caller's scales take it back.  For bf16 the power of two between the biases is multiplied in here.
template <typename T>
__device__ __forceinline__ u32 expand_fp8(u32 bytes, bool odd);
template <>
__device__ __forceinline__ u32 expand_fp8<f16>(u32 bytes, bool odd) {
  return odd ? (bytes & 0x80008000u) | ((bytes & 0x7f007f00u) >> 1)
             : ((bytes & 0x00800080u) << 8) | ((bytes & 0x007f007fu) << 7);
}
template <>
__device__ __forceinline__ u32 expand_fp8<bf16>(u32 bytes, bool odd) {
  u32 bits = odd ? (bytes & 0x80008000u) | ((bytes & 0x7f007f00u) >> 4)
                 : ((bytes & 0x00800080u) << 8) | ((bytes & 0x007f007fu) << 4);
  u32 factor = 0x7b807b80u;  // 2^120 twice
  __nv_bfloat162 pair = __hmul2(*reinterpret_cast<__nv_bfloat162*>(&bits), *reinterpret_cast<__nv_bfloat162*>(&factor));
  return *reinterpret_cast<u32*>(&pair);
}
template <typename T, typename KV>
constexpr float kStoredFactor = 1.0f;
template <>
constexpr float kStoredFactor<f16, fp8> = 256.0f;

// By how much (as a power of two) a score may exceed the maximum that probabilities are relative to, before that is
// raised.  f16 probabilities times fp8 scales have no room above 1.
template <typename T, typename KV>
constexpr float kSlack = 8.0f;
template <>
constexpr float kSlack<f16, fp8> = 0.0f;

// The query's fragments (b of mma) of one pair: in registers, or where those do not suffice in shared memory, a lane's
// words of a step side by side.
template <int kSteps, int kHeadTiles, bool kShared = (kSteps * kHeadTiles > 16)>
struct Query {
  static constexpr int kSharedBytes = 0;
  u32 words[kSteps][kHeadTiles][2];

  __device__ __forceinline__ void place(const u8*, int) {}
  __device__ __forceinline__ void set(int step, int tile, u32 low, u32 high) {
    words[step][tile][0] = low;
    words[step][tile][1] = high;
  }
  __device__ __forceinline__ void get(int step, u32 (&out)[kHeadTiles][2]) const {
#pragma unroll
    for (int i = 0; i < 2 * kHeadTiles; ++i) out[i / 2][i % 2] = words[step][i / 2][i % 2];
  }
};
template <int kSteps, int kHeadTiles>
struct Query<kSteps, kHeadTiles, true> {
  static_assert(kHeadTiles == 2, "a step is one 16-byte access");
  static constexpr int kSharedBytes = kSteps * kWarp * 16;
  u32 address;

  __device__ __forceinline__ void place(const u8* base, int lane) { address = shared_address(base) + 16 * lane; }
  __device__ __forceinline__ void set(int step, int tile, u32 low, u32 high) {
    const u32 place = address + step * 16 * kWarp + 8 * tile;
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(place), "r"(low), "r"(high) : "memory");
  }
  __device__ __forceinline__ void get(int step, u32 (&out)[kHeadTiles][2]) const {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0][0]), "=r"(out[0][1]), "=r"(out[1][0]), "=r"(out[1][1])
                 : "r"(address + step * 16 * kWarp)
                 : "memory");
  }
};

// A warp's running softmax of one pair.  Heads are columns: a lane holds heads 2 * member and + 1 of every 8, where
// lane = 4 * row + member.
template <int kSteps, int kHeadTiles>
struct Running {
  Query<kSteps, kHeadTiles> query;
  float out[kSteps][kHeadTiles][4];
  float top[kHeadTiles][2];  // what probabilities are relative to, in powers of two
  float sum[kHeadTiles][2];  // this lane's keys only
};

// fp8 keys meet the tensor cores with columns 4m, 4m + 2, 4m + 1, 4m + 3 in the places of 2m, 2m + 1, 2m + 8, 2m + 9.
template <typename T, bool kFp8, int kSteps, int kHeadTiles>
__device__ __forceinline__ void load_query(const PagedDecodeParams& p, const Pair& pair,
                                           Query<kSteps, kHeadTiles>& query, int lane) {
  const int member = lane % 4;
  const T* row = static_cast<const T*>(p.query) + pair.row * p.query_stride + pair.head * p.group * 16 * kSteps;
#pragma unroll
  for (int tile = 0; tile < kHeadTiles; ++tile) {
    const int head = 8 * tile + lane / 4;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const T* from = row + (head * kSteps + step) * 16;
      uint2 pairs = make_uint2(0, 0);
      if constexpr (kFp8) {
        if (head < p.group) pairs = *reinterpret_cast<const uint2*>(from + 4 * member);
        pairs = make_uint2(__byte_perm(pairs.x, pairs.y, 0x5410), __byte_perm(pairs.x, pairs.y, 0x7632));
      } else if (head < p.group) {
        pairs.x = *reinterpret_cast<const u32*>(from + 2 * member);
        pairs.y = *reinterpret_cast<const u32*>(from + 2 * member + 8);
      }
      query.set(step, tile, pairs.x, pairs.y);
    }
  }
}

template <int kSteps, int kHeadTiles>
__device__ __forceinline__ void clear(Running<kSteps, kHeadTiles>& run) {
#pragma unroll
  for (int tile = 0; tile < kHeadTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < 4 * kSteps; ++i) run.out[i / 4][tile][i % 4] = 0.0f;
    run.top[tile][0] = run.top[tile][1] = negative_infinity();
    run.sum[tile][0] = run.sum[tile][1] = 0.0f;
  }
}

// `rows`: this lane's row of ldmatrix; the chunk of a load differs from it by an exclusive or.
// scores[.][0], [1]: key lane / 4; [2], [3]: key lane / 4 + 8.
template <typename T, typename Shape, int kSteps, int kHeadTiles>
__device__ __forceinline__ void multiply_keys(u32 rows, const Running<kSteps, kHeadTiles>& run,
                                              float (&scores)[kHeadTiles][4]) {
  float odd[kHeadTiles][4] = {};
#pragma unroll
  for (int load = 0; load < Shape::kRowBytes / 32; ++load) {
    u32 raw[4];
    ldmatrix_x4(raw, rows ^ (32 * load));
    if constexpr (Shape::kFp8) {
      const u32 a[4] = {expand_fp8<T>(raw[0], false), expand_fp8<T>(raw[1], false), expand_fp8<T>(raw[0], true),
                        expand_fp8<T>(raw[1], true)};
      const u32 b[4] = {expand_fp8<T>(raw[2], false), expand_fp8<T>(raw[3], false), expand_fp8<T>(raw[2], true),
                        expand_fp8<T>(raw[3], true)};
      u32 query[2][kHeadTiles][2];
      run.query.get(2 * load, query[0]);
      run.query.get(2 * load + 1, query[1]);
#pragma unroll
      for (int tile = 0; tile < kHeadTiles; ++tile) {
        mma_16816<T>(scores[tile], a, query[0][tile]);
        mma_16816<T>(odd[tile], b, query[1][tile]);
      }
    } else {
      u32 query[kHeadTiles][2];
      run.query.get(load, query);
#pragma unroll
      for (int tile = 0; tile < kHeadTiles; ++tile)
        mma_16816<T>(load % 2 ? odd[tile] : scores[tile], raw, query[tile]);
    }
  }
#pragma unroll
  for (int tile = 0; tile < kHeadTiles; ++tile)
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[tile][i] += odd[tile][i];
}

__device__ __forceinline__ float read_shared(u32 address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
  return value;
}

// cap * tanh(x), where tanh x = 1 - 2 / (e^2x + 1) is right at both infinities.
__device__ __forceinline__ float soft_capped(float x, float cap) {
  return cap * (1.0f - __fdividef(2.0f, power_of_two(x * (2.0f * kLog2E)) + 1.0f));
}

// Raw products of a tile to scores in powers of two.  `scales`: where those of this lane's keys are.
template <typename T, typename KV, int kHeadTiles>
__device__ __forceinline__ void scale_scores(const PagedDecodeParams& p, u32 scales, float (&scores)[kHeadTiles][4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float scale = p.score_scale * kStoredFactor<T, KV>;
    if constexpr (sizeof(KV) == 1) scale *= read_shared(scales + 32 * half);
#pragma unroll
    for (int i = 0; i < 2 * kHeadTiles; ++i) scores[i / 2][2 * half + i % 2] *= scale;
  }
  if (p.cap == 0.0f) return;
#pragma unroll
  for (int i = 0; i < 4 * kHeadTiles; ++i) scores[i / 4][i % 4] = soft_capped(scores[i / 4][i % 4], p.cap);
}

// Keys outside [low, high) of the tile get minus infinity; the caller's v_scale gets 0 for them.
template <int kHeadTiles>
__device__ __forceinline__ void mask_scores(int low, int high, float (&scores)[kHeadTiles][4], float (&v_scale)[2],
                                            int lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int key = lane / 4 + 8 * half;
    const bool seen = low <= key && key < high;
    if (!seen) v_scale[half] = 0.0f;
#pragma unroll
    for (int i = 0; i < 2 * kHeadTiles; ++i)
      scores[i / 2][2 * half + i % 2] = seen ? scores[i / 2][2 * half + i % 2] : negative_infinity();
  }
}

// Raises the maxima to those of the scores; what was summed before is scaled to them.
template <int kSteps, int kHeadTiles>
__device__ __forceinline__ void raise_tops(const float (&scores)[kHeadTiles][4], Running<kSteps, kHeadTiles>& run) {
#pragma unroll
  for (int tile = 0; tile < kHeadTiles; ++tile)
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float top = fmaxf(scores[tile][c], scores[tile][c + 2]);
#pragma unroll
      for (int step = 4; step < kWarp; step *= 2) top = fmaxf(top, __shfl_xor_sync(kFullMask, top, step));
      top = fmaxf(top, run.top[tile][c]);
      const float decay = power_of_two(run.top[tile][c] - top);
      run.top[tile][c] = top;
      run.sum[tile][c] *= decay;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        run.out[step][tile][c] *= decay;
        run.out[step][tile][c + 2] *= decay;
      }
    }
}

// Scores to probabilities, up to a factor that stays the same for most tiles.
template <int kSteps, int kHeadTiles>
__device__ __forceinline__ void softmax_step(float (&scores)[kHeadTiles][4], float slack,
                                             Running<kSteps, kHeadTiles>& run) {
  bool higher = false;
#pragma unroll
  for (int i = 0; i < 2 * kHeadTiles; ++i)
    higher = higher || fmaxf(scores[i / 2][i % 2], scores[i / 2][i % 2 + 2]) > run.top[i / 2][i % 2] + slack;
  if (__any_sync(kFullMask, higher)) raise_tops(scores, run);
#pragma unroll
  for (int i = 0; i < 4 * kHeadTiles; ++i)
    scores[i / 4][i % 4] = power_of_two(scores[i / 4][i % 4] - run.top[i / 4][i % 2]);
#pragma unroll
  for (int i = 0; i < 2 * kHeadTiles; ++i)
    run.sum[i / 2][i % 2] += scores[i / 2][i % 2] + scores[i / 2][i % 2 + 2];
}

template <typename T, typename Shape, int kSteps, int kHeadTiles>
__device__ __forceinline__ void multiply_values(u32 rows, const u32 (&weights)[kHeadTiles][2],
                                                Running<kSteps, kHeadTiles>& run) {
#pragma unroll
  for (int load = 0; load < Shape::kRowBytes / 32; ++load) {
    u32 raw[4];
    ldmatrix_x4_trans(raw, rows ^ (32 * load));
    if constexpr (Shape::kFp8) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const u32 a[4] = {expand_fp8<T>(raw[half], false), expand_fp8<T>(raw[half], true),
                          expand_fp8<T>(raw[half + 2], false), expand_fp8<T>(raw[half + 2], true)};
#pragma unroll
        for (int tile = 0; tile < kHeadTiles; ++tile) mma_16816<T>(run.out[2 * load + half][tile], a, weights[tile]);
      }
    } else {
#pragma unroll
      for (int tile = 0; tile < kHeadTiles; ++tile) mma_16816<T>(run.out[load][tile], raw, weights[tile]);
    }
  }
}

// One tile whose copies are complete; `high` as in Source.
template <typename T, typename KV, int kHeadDim, int kHeadTiles>
__device__ __forceinline__ void attend_tile(const PagedDecodeParams& p, u32 stage, const LaneOffsets& offsets,
                                            int high, Running<kHeadDim / 16, kHeadTiles>& run, int lane) {
  using Shape = TileShape<KV, kHeadDim>;
  const u32 scales = stage + 2 * Shape::kBytes + 4 * (lane / 4);
  float scores[kHeadTiles][4] = {}, v_scale[2] = {1.0f, 1.0f};
  multiply_keys<T, Shape>(stage + offsets.keys, run, scores);
  scale_scores<T, KV>(p, scales, scores);
  if constexpr (Shape::kFp8) {
#pragma unroll
    for (int half = 0; half < 2; ++half) v_scale[half] = kStoredFactor<T, KV> * read_shared(scales + 64 + 32 * half);
  }
  if (!sees_all(p, high)) mask_scores(p.window > 0 ? high - p.window : 0, high, scores, v_scale, lane);
  softmax_step(scores, kSlack<T, KV>, run);
  u32 weights[kHeadTiles][2];
#pragma unroll
  for (int i = 0; i < 2 * kHeadTiles; ++i) {
    const int tile = i / 2, half = i % 2;
    float low = scores[tile][2 * half], next = scores[tile][2 * half + 1];
    if constexpr (Shape::kFp8) low *= v_scale[half], next *= v_scale[half];
    weights[tile][half] = transpose_8x8(pack2<T>(low, next));
  }
  multiply_values<T, Shape>(stage + offsets.values, weights, run);
}

// ---- results -------------------------------------------------------------------------------------------------------

// What a sum of softmax terms is divided by, as a factor, the head's sink included.
__device__ __forceinline__ float normaliser(const PagedDecodeParams& p, int head, float top, float sum) {
  if (p.sinks == nullptr) return __fdividef(1.0f, sum);
  const float sink = p.sinks[head] * kLog2E, higher = fmaxf(top, sink), decay = power_of_two(top - higher);
  return __fdividef(decay, sum * decay + power_of_two(sink - higher));
}

template <int kSteps, int kHeadTiles>
__device__ __forceinline__ void sum_lanes(Running<kSteps, kHeadTiles>& run) {
#pragma unroll
  for (int step = 4; step < kWarp; step *= 2)
#pragma unroll
    for (int i = 0; i < 2 * kHeadTiles; ++i)
      run.sum[i / 2][i % 2] += __shfl_xor_sync(kFullMask, run.sum[i / 2][i % 2], step);
}

// Floats of one head's partial: its columns, maximum, sum, two unused.
template <int kHeadDim>
constexpr int kPartialStride = kHeadDim + 4;

// Where the softmax of a pair's own keys goes; null where those are all keys of its row.
template <int kHeadDim>
__device__ __forceinline__ float* own_state(const PagedDecodeParams& p, int row, int head) {
  if (p.starts == nullptr || p.starts[row] == 0) return nullptr;
  return p.states + (static_cast<i64>(row) * p.kv_heads + head) * p.group * kPartialStride<kHeadDim>;
}

// A pair that this warp saw whole, straight to `out`.
template <typename T, bool kFp8, int kSteps, int kHeadTiles>
__device__ __forceinline__ void write_whole(const PagedDecodeParams& p, const Pair& pair,
                                            Running<kSteps, kHeadTiles>& run, int lane) {
  const int first_head = pair.head * p.group, member = lane % 4;
  T* row = static_cast<T*>(p.out) + pair.row * p.out_stride + first_head * 16 * kSteps;
#pragma unroll
  for (int tile = 0; tile < kHeadTiles; ++tile) {
    float factor[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int head = min(8 * tile + 2 * member + c, p.group - 1);
      factor[c] = normaliser(p, first_head + head, run.top[tile][c], run.sum[tile][c]);
    }
    const int head = 8 * tile + lane / 4;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const float(&o)[4] = run.out[step][tile];
      const u32 low = transpose_8x8(pack2<T>(o[0] * factor[0], o[1] * factor[1]));
      const u32 high = transpose_8x8(pack2<T>(o[2] * factor[0], o[3] * factor[1]));
      T* place = row + head * 16 * kSteps + 16 * step;
      if (head >= p.group) continue;
      if constexpr (kFp8) {  // low: columns 4m, 4m + 2; high: 4m + 1, 4m + 3
        *reinterpret_cast<uint2*>(place + 4 * member) =
            make_uint2(__byte_perm(low, high, 0x5410), __byte_perm(low, high, 0x7632));
      } else {
        *reinterpret_cast<u32*>(place + 2 * member) = low;
        *reinterpret_cast<u32*>(place + 2 * member + 8) = high;
      }
    }
  }
}

// A part of a pair, not normalised: a row a head.
template <bool kFp8, int kSteps, int kHeadTiles>
__device__ __forceinline__ void write_partial(float* partial, int group, const Running<kSteps, kHeadTiles>& run,
                                              int lane) {
#pragma unroll
  for (int i = 0; i < 2 * kHeadTiles; ++i) {
    const int tile = i / 2, c = i % 2, head = 8 * tile + 2 * (lane % 4) + c;
    if (head >= group) continue;
    float* row = partial + head * kPartialStride<16 * kSteps>;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      row[16 * step + (kFp8 ? 2 * (lane / 4) : lane / 4)] = run.out[step][tile][c];
      row[16 * step + (kFp8 ? 2 * (lane / 4) + 1 : lane / 4 + 8)] = run.out[step][tile][c + 2];
    }
    if (lane < 4) *reinterpret_cast<float2*>(row + 16 * kSteps) = make_float2(run.top[tile][c], run.sum[tile][c]);
  }
}

// ---- merging -------------------------------------------------------------------------------------------------------

// A pair of which a warp or a block holds a part.
struct Part {
  int begin;  // on the line; -1: no part
  int row;
  int head;
  int open;         // -1: the block holds the whole pair; 0: the pair goes on in the next block; 1: it ends in this one
  int first_block;  // of an open pair, and how many there are
  int blocks;
};

struct BlockState {
  Piece pieces[kMaxWarps];
  Pair pairs[2 * kMaxWarps];  // what a warp computes and what it copies: here, because registers are short
  Part parts[2 * kMaxWarps];  // of a warp: its first pair, if the warp holds a part of it and goes on; its last pair
  Part open[2];
  int merges[2];  // whether this block merges the open pair, having arrived last
};

constexpr int kStateBytes = 1280;  // of dynamic shared memory
static_assert(sizeof(BlockState) <= kStateBytes, "the launch leaves so many bytes");

// Notes the pair that a warp begins, unless the warp sees all of it.
__device__ __forceinline__ void note_part(const Piece& piece, const Pair& pair, const Range& on_line, Part* parts,
                                          int lane) {
  if (piece.warp.holds(on_line)) return;
  Part part = {on_line.begin, pair.row, pair.head, -1, 0, 0};
  if (!piece.block.holds(on_line)) {
    const int block = piece.cut.block_of(lane == 0 ? on_line.begin : on_line.end - 1);
    part.first_block = __shfl_sync(kFullMask, block, 0);
    part.blocks = __shfl_sync(kFullMask, block, 1) - part.first_block + 1;
    part.open = on_line.end > piece.block.end ? 0 : 1;
  }
  if (lane == 0) parts[on_line.end < piece.warp.end ? 0 : 1] = part;
}

__device__ __forceinline__ float* block_partial(const PagedDecodeParams& p, int floats, int block, int open) {
  const int counters = (static_cast<int>(gridDim.x) + 63) & ~63;
  return static_cast<float*>(p.workspace) + counters + static_cast<i64>(2 * block + open) * floats;
}

// Parts of one pair in order of the line, `step` floats apart but for the last.
struct Rows {
  const float* base;
  const float* last;
  int step;
  int count;

  __device__ __forceinline__ const float* operator[](int i) const { return i + 1 == count ? last : base + i * step; }
};

// A pair's parts, two columns of one head a thread, to `partial`; or where that is null, normalised to `out`.
template <typename T, int kHeadDim>
__device__ __forceinline__ void merge_pair(const PagedDecodeParams& p, const Rows& rows, const Part& pair,
                                           float* partial) {
#pragma unroll 1
  for (int i = threadIdx.x; i < p.group * kHeadDim / 2; i += blockDim.x) {
    const int head = 2 * i / kHeadDim, column = 2 * i % kHeadDim, offset = head * kPartialStride<kHeadDim>;
    float top = negative_infinity(), sum = 0.0f;
    float2 out = make_float2(0.0f, 0.0f);
#pragma unroll 4
    for (int part = 0; part < rows.count; ++part) top = fmaxf(top, rows[part][offset + kHeadDim]);
#pragma unroll 4
    for (int part = 0; part < rows.count; ++part) {
      const float* row = rows[part] + offset;
      const float2 stats = *reinterpret_cast<const float2*>(row + kHeadDim);
      const float2 values = *reinterpret_cast<const float2*>(row + column);
      const float weight = power_of_two(stats.x - top);
      sum += stats.y * weight;
      out.x += values.x * weight;
      out.y += values.y * weight;
    }
    if (partial != nullptr) {
      *reinterpret_cast<float2*>(partial + offset + column) = out;
      if (column == 0) *reinterpret_cast<float2*>(partial + offset + kHeadDim) = make_float2(top, sum);
    } else {
      const int q_head = pair.head * p.group + head;
      const float factor = normaliser(p, q_head, top, sum);
      T* place = static_cast<T*>(p.out) + pair.row * p.out_stride + q_head * kHeadDim + column;
      *reinterpret_cast<u32*>(place) = pack2<T>(out.x * factor, out.y * factor);
    }
  }
}

// A block's shared memory while it merges: rings of its warps, and their stashes.
struct Memory {
  float* rings;
  int ring_floats;
  float* stashes;
  int partial_floats;
};

// Merges what the block's warps left of each pair; open pairs go to the workspace.  Returns whether there is one.
template <typename T, int kHeadDim>
__device__ __forceinline__ bool merge_warps(const PagedDecodeParams& p, BlockState& state, const Memory& memory,
                                            int lane) {
  const int begin = lane < 2 * kMaxWarps ? state.parts[lane].begin : -1;
  u32 present = __ballot_sync(kFullMask, begin >= 0);
  bool any_open = false;
#pragma unroll 1
  while (present != 0) {
    const int first = __ffs(static_cast<int>(present)) - 1;
    const u32 same = __ballot_sync(kFullMask, begin == __shfl_sync(kFullMask, begin, first));
    const int last = 31 - __clz(static_cast<int>(same));  // parts of a pair are last pairs of neighbours, then any
    present &= ~same;
    const Part pair = state.parts[first];
    const float* ring = memory.rings + first / 2 * memory.ring_floats;
    const float* end = last % 2 ? memory.rings + last / 2 * memory.ring_floats
                                : memory.stashes + last / 2 * memory.partial_floats;
    float* partial = pair.open < 0 ? own_state<kHeadDim>(p, pair.row, pair.head)
                                   : block_partial(p, memory.partial_floats, blockIdx.x, pair.open);
    merge_pair<T, kHeadDim>(p, Rows{ring, end, memory.ring_floats, __popc(same)}, pair, partial);
    if (pair.open < 0) continue;
    any_open = true;
    if (threadIdx.x == 0) state.open[pair.open] = pair;
  }
  return any_open;
}

__device__ __forceinline__ int count_arrival(int* counter) {
  int before;
  asm volatile("atom.add.acq_rel.gpu.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

// Counts this block's arrival at its open pairs, after their partials are written; by the first two threads.  The
// counter of a pair's first block counts its blocks and is zero again afterwards; a block is the first of one open
// pair at most.
__device__ __forceinline__ void arrive(const PagedDecodeParams& p, BlockState& state) {
  const Part& pair = state.open[threadIdx.x];
  bool last = false;
  if (pair.begin >= 0) {
    int* counter = static_cast<int*>(p.workspace) + pair.first_block;
    last = count_arrival(counter) == pair.blocks - 1;
    if (last) *counter = 0;
  }
  state.merges[threadIdx.x] = last;
}

// The partials of the blocks of an open pair, copied to `memory` where they fit.
__device__ __forceinline__ Rows fetch_partials(const PagedDecodeParams& p, const Part& pair, int floats, float* memory,
                                               int memory_floats) {
  const float* base = block_partial(p, floats, pair.first_block, 0);
  const float* last = block_partial(p, floats, pair.first_block + pair.blocks - 1, 1);
  if (pair.blocks * floats > memory_floats) return Rows{base, last, 2 * floats, pair.blocks};
  __syncthreads();  // nobody reads the memory any more
#pragma unroll 1
  for (int block = threadIdx.x / kWarp; block < pair.blocks; block += blockDim.x / kWarp) {
    const float* from = block + 1 == pair.blocks ? last : base + 2 * block * floats;
#pragma unroll 1
    for (int i = 4 * (threadIdx.x % kWarp); i < floats; i += 4 * kWarp)
      cp_async_16(shared_address(memory + block * floats + i), from + i);
  }
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  return Rows{memory, memory + (pair.blocks - 1) * floats, floats, pair.blocks};
}

// ---- the kernel ----------------------------------------------------------------------------------------------------

// Where a warp works in shared memory.
struct WarpMemory {
  u8* ring;
  float* stash;
  const u8* query;
  Pair* pair;   // that it computes
  Part* parts;  // two
};

// Where a warp is on the line: at tile `at`, with `high` as in Source; its tiles of the pair end at `stop`.
struct Progress {
  int at;
  int stop;
  int high;

  __device__ __forceinline__ Range pair_on_line(const Pair& pair) const {
    const int begin = at + pair.first - (pair.length - high) / kTileKeys;
    return {begin, begin + pair.end - pair.first};
  }
};

template <typename T, bool kFp8, int kSteps, int kHeadTiles>
__device__ __forceinline__ void begin_pair(const PagedDecodeParams& p, const Piece& piece, const WarpMemory& memory,
                                           Running<kSteps, kHeadTiles>& run, Progress& progress, int lane) {
  const Pair pair = *memory.pair;
  const Range on_line = progress.pair_on_line(pair);
  load_query<T, kFp8>(p, pair, run.query, lane);
  clear(run);
  progress.stop = min(piece.warp.end, on_line.end);
  note_part(piece, pair, on_line, memory.parts, lane);
}

// To `out` (or `states`) if the warp saw all of the pair; otherwise to its stash, or where it is the last to the ring.  Goes on to
// the next pair; returns whether there is one.
template <typename T, bool kFp8, int kSteps, int kHeadTiles>
__device__ __forceinline__ bool end_pair(const PagedDecodeParams& p, const Piece& piece, const WarpMemory& memory,
                                         Running<kSteps, kHeadTiles>& run, Progress& progress, int lane) {
  Pair pair = *memory.pair;
  const Range on_line = progress.pair_on_line(pair);
  sum_lanes(run);
  float* partial = on_line.end < piece.warp.end ? memory.stash : reinterpret_cast<float*>(memory.ring);
  if (piece.warp.holds(on_line)) partial = own_state<16 * kSteps>(p, pair.row, pair.head);
  if (partial == nullptr)
    write_whole<T, kFp8>(p, pair, run, lane);
  else
    write_partial<kFp8>(partial, p.group, run, lane);
  if (progress.at == piece.warp.end) return false;
  next_pair(p, pair);
  replace_pair(memory.pair, pair);
  progress.high = pair.length - pair.first * kTileKeys;
  return true;
}

// The warp's tiles, pair by pair.  Each step computes on the oldest stage and fills it anew; the first steps only fill.
// Copies of keys that earlier launches wrote start before the launch in front has ended, the tile of a row's newest
// key does not.
template <typename T, typename KV, int kHeadDim, int kHeadTiles>
__device__ __forceinline__ void run_warp(const PagedDecodeParams& p, const Piece& piece, Source& source,
                                         const WarpMemory& memory, int lane) {
  using Shape = TileShape<KV, kHeadDim>;
  const u32 begin = shared_address(memory.ring), end = begin + p.stages * Shape::kStageBytes;
  const LaneOffsets offsets = lane_offsets<Shape>(lane);
  Running<kHeadDim / 16, kHeadTiles> run;
  run.query.place(memory.query, lane);
  Progress progress = {piece.warp.begin, piece.warp.begin, source.high};
  u32 stage = begin;
#pragma unroll 1
  for (int step = -p.stages;; ++step) {
    if (step == 0) {
      wait_for_previous_kernel();
      let_next_kernel_start();
    }
    if (step >= 0) {
      if (progress.at == progress.stop) begin_pair<T, Shape::kFp8>(p, piece, memory, run, progress, lane);
      wait_for_oldest(p.stages);
      __syncwarp();
      attend_tile<T, KV, kHeadDim, kHeadTiles>(p, stage, offsets, progress.high, run, lane);
      progress.high -= kTileKeys;
      ++progress.at;
      __syncwarp();
    }
    if (source.left > 0) {
      if (step < 0 && source.tile + 1 == source.end) wait_for_previous_kernel();
      copy_tile<Shape>(p, source, stage + offsets.copies, stage, lane);
    }
    cp_async_commit();
    stage = stage + Shape::kStageBytes == end ? begin : stage + Shape::kStageBytes;
    if (step < 0 || progress.at < progress.stop) continue;
    if (!end_pair<T, Shape::kFp8>(p, piece, memory, run, progress, lane)) return;
  }
}

// Merges what the block's warps and, where it arrives last, what the blocks left of its pairs.
template <typename T, int kHeadDim>
__device__ __forceinline__ void merge_all(const PagedDecodeParams& p, BlockState& state, const Memory& memory,
                                          int memory_floats, int lane) {
  if (!merge_warps<T, kHeadDim>(p, state, memory, lane)) return;
  __syncthreads();
  if (threadIdx.x < 2) arrive(p, state);
  __syncthreads();
#pragma unroll 1
  for (int open = 0; open < 2; ++open) {
    if (!state.merges[open]) continue;
    const Part pair = state.open[open];
    const Rows partials = fetch_partials(p, pair, memory.partial_floats, memory.rings, memory_floats);
    merge_pair<T, kHeadDim>(p, partials, pair, own_state<kHeadDim>(p, pair.row, pair.head));
  }
}

// Grid: any size; blocks of 1 to 8 warps.  Dynamic shared memory: rings of warps * stages * kStageBytes, queries of
// warps * kSharedBytes, stashes of warps * group * kPartialStride floats, kStateBytes.  A ring has room for a stash.
template <typename T, typename KV, int kHeadDim, int kHeadTiles>
__global__ void __launch_bounds__(kWarp* kMaxWarps, 1) paged_decode(const __grid_constant__ PagedDecodeParams p) {
  using Shape = TileShape<KV, kHeadDim>;
  static_assert(kHeadDim % 64 == 0 && kHeadDim <= 256 && kHeadTiles >= 1 && kHeadTiles <= 2, "no such variant");
  constexpr int kQueryBytes = Query<kHeadDim / 16, kHeadTiles>::kSharedBytes;
  extern __shared__ __align__(1024) u8 shared[];
  const int warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  int lane = threadIdx.x % kWarp;
  asm volatile("" : "+r"(lane));  // kept in a register
  const int ring_bytes = p.stages * Shape::kStageBytes, partial_floats = p.group * kPartialStride<kHeadDim>;
  u8* const queries = shared + warps * ring_bytes;
  float* const stashes = reinterpret_cast<float*>(queries + warps * kQueryBytes);
  float* const memory_end = stashes + warps * partial_floats;
  BlockState& state = *reinterpret_cast<BlockState*>(memory_end);
  if (lane < 2) state.parts[2 * warp + lane].begin = -1;
  if (warp == 0 && lane >= 2 * warps && lane < 2 * kMaxWarps) state.parts[lane].begin = -1;
  if (threadIdx.x < 2) state.open[threadIdx.x].begin = -1;
  if (p.early_reads == 0) wait_for_previous_kernel();
  Range rows;
  const Piece piece = cut_line(p, warp, warps, lane, rows);
  if (piece.block.begin == piece.block.end) {
    wait_for_previous_kernel();
    return;
  }
  if (piece.warp.begin < piece.warp.end) {
    const WarpMemory memory = {shared + warp * ring_bytes, stashes + warp * partial_floats,
                               queries + warp * kQueryBytes, state.pairs + 2 * warp, state.parts + 2 * warp};
    Source source;
    int tile;
    const Pair pair = find_pair(p, piece.warp.begin, rows, tile);
    source.pair = memory.pair + 1;
    source.left = piece.warp.end - piece.warp.begin;
    state.pieces[warp] = piece;
    *memory.pair = pair;
    start_source(p, source, pair, tile, false, lane);
    run_warp<T, KV, kHeadDim, kHeadTiles>(p, state.pieces[warp], source, memory, lane);
  } else {
    wait_for_previous_kernel();
  }
  __syncthreads();
  const Memory memory = {reinterpret_cast<float*>(shared), ring_bytes / 4, stashes, partial_floats};
  merge_all<T, kHeadDim>(p, state, memory, static_cast<int>(memory_end - memory.rings), lane);
}

}  // namespace edgellm
