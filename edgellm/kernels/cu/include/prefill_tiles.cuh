// Tiles of paged_prefill in shared memory and in registers: swizzled rows, page loads, fragments of f16, bf16 and e4m3.
// A warp works on kRowTiles * 16 packed query rows; lane = 4 * line + member.  A key tile is 64 rows of D elements.
#pragma once

#include "mma.cuh"
#include "prefill_work.cuh"

namespace edgellm {

// Rows of kRowBytes in 16-byte chunks; chunks are exchanged within a row by the row number, so that the eight rows that
// one ldmatrix phase reads at the same column lie in different banks.  Every 8 rows the pattern starts anew.
template <int kRowBytes>
__device__ __forceinline__ u32 swizzled(int row, int chunk) {
  constexpr int kChunks = kRowBytes / 16;
  const int turn = kChunks >= 8 ? row & 7 : (row / (8 / kChunks)) & (kChunks - 1);
  return static_cast<u32>(row * kRowBytes + ((chunk ^ turn) * 16));
}

// The address so many 16-byte chunks further in the same row, where the sum is a bitwise or: as rows start at multiples
// of kRowBytes, one exclusive or.
__device__ __forceinline__ u32 chunks_on(u32 address, int chunks) { return address ^ static_cast<u32>(chunks * 16); }

// ---- e4m3 ----------------------------------------------------------------------------------------------------------

// Four e4m3 bytes to two pairs of T: (bytes 0, 2) and (bytes 1, 3).  The byte's exponent and fraction are moved to
// the place they have in T, which is the value times 2^-8 (f16) or 2^-120 (bf16), subnormals included.  For bf16 that
// is mended by an exact multiplication; for f16 whoever uses the product does it (kFp8Rest).
// The two NaN codes become 480: what a NaN was stored for is not shown.
template <typename T>
constexpr float kFp8Rest = 1.0f;
template <>
constexpr float kFp8Rest<f16> = 256.0f;

template <typename T>
__device__ __forceinline__ void unpack_e4m3(u32 bytes, u32& even, u32& odd);
template <>
__device__ __forceinline__ void unpack_e4m3<f16>(u32 bytes, u32& even, u32& odd) {
  even = ((bytes << 8) & 0x80008000u) | ((bytes << 7) & 0x3f803f80u);
  odd = (bytes & 0x80008000u) | ((bytes >> 1) & 0x3f803f80u);
}
template <>
__device__ __forceinline__ void unpack_e4m3<bf16>(u32 bytes, u32& even, u32& odd) {
  even = ((bytes << 8) & 0x80008000u) | ((bytes << 4) & 0x07f007f0u);
  odd = (bytes & 0x80008000u) | ((bytes >> 4) & 0x07f007f0u);
  const u32 power = 0x7b807b80u, minus_zero = 0x80008000u;  // 2^120
  asm("fma.rn.bf16x2 %0, %0, %1, %2;" : "+r"(even) : "r"(power), "r"(minus_zero));
  asm("fma.rn.bf16x2 %0, %0, %1, %2;" : "+r"(odd) : "r"(power), "r"(minus_zero));
}

// ---- loads ---------------------------------------------------------------------------------------------------------

// Loads key tiles and value tiles of one sequence and kv head, in turn, from pages.  Keys outside [begin, end) and
// keys without a page become zeros: nothing is read there, and what other sequences keep there may be NaN.
template <typename KV, int D, int kThreads, bool kSegments, typename Params = PagedPrefillParams>
struct PageLoader {
  static constexpr bool kFp8 = sizeof(KV) == 1;
  static constexpr int kRowBytes = D * static_cast<int>(sizeof(KV));
  static constexpr int kTileBytes = kKeyTile * kRowBytes;
  static constexpr int kStageBytes = kTileBytes + (kFp8 ? 2 * kKeyTile * 4 : 0);  // keys: both scales
  static constexpr int kPlaces = 16;               // keys that surely share a page
  static constexpr int kRunKeys = kWarp * kPlaces;  // keys whose page numbers a warp's lanes hold
  static constexpr int kRunTiles = kRunKeys / kKeyTile;

  const Params& p;
  const int* table;   // page numbers of the sequence
  int begin, end;     // keys
  int tile, stop_tile;
  int page_ids, next_page_ids;  // lane i: page of keys i * kPlaces of the run of `tile`, and of the next run

  // The block's next tile: other blocks may have the segments in between.
  __device__ __forceinline__ int after(int t) const {
    if constexpr (kSegments) {
      constexpr int kSegmentTiles = kSegmentTokens / kKeyTile;
      return t + 1 + ((t + 1) % kSegmentTiles == 0 ? (p.splits - 1) * kSegmentTiles : 0);
    }
    return t + 1;
  }
  __device__ __forceinline__ int load_page_ids(int run) const {
    const int key = run * kRunKeys + static_cast<int>(threadIdx.x % kWarp) * kPlaces;
    return key < end ? __ldg(table + (key >> p.page_shift)) : -1;
  }
  __device__ __forceinline__ void start() {
    page_ids = load_page_ids(tile / kRunTiles);
    next_page_ids = load_page_ids(after(tile | (kRunTiles - 1)) / kRunTiles);
  }
  __device__ __forceinline__ void advance() {
    const int run = tile / kRunTiles;
    tile = after(tile);
    if (tile / kRunTiles != run) start_run();
  }
  __device__ __forceinline__ void start_run() {
    page_ids = next_page_ids;
    next_page_ids = load_page_ids(after(tile | (kRunTiles - 1)) / kRunTiles);
  }

  __device__ __forceinline__ const char* head_of(bool values) const {
    const u32 head = blockIdx.x + (values ? p.num_kv_heads : 0);
    return static_cast<const char*>(p.pages) + static_cast<u64>(head) * static_cast<u32>(p.head_bytes);
  }
  __device__ __forceinline__ int page_of(int key) const {
    return __shfl_sync(kFullMask, page_ids, static_cast<u32>(key) / kPlaces % kWarp);
  }

  // 16 keys are one contiguous piece of a page; a thread copies the same 16-byte chunks of every piece.
  __device__ __forceinline__ void load(u32 stage, bool values) const {
    constexpr int kPieceChunks = kPlaces * kRowBytes / 16;
    constexpr int kEach = kPieceChunks >= kThreads ? kPieceChunks / kThreads : 1;
    constexpr int kPieces = kPieceChunks >= kThreads ? 1 : kThreads / kPieceChunks;  // at the same time
    static_assert(kPieces <= 4 && kPieceChunks % kThreads * (kThreads % kPieceChunks) == 0, "threads fill pieces");
    const int piece = threadIdx.x / (kPieceChunks / kEach) % kPieces, first = threadIdx.x % (kPieceChunks / kEach);
    const char* head = head_of(values);
    const u32 keys_inside = end - begin;
#pragma unroll
    for (int group = 0; group < 4; group += kPieces) {
      const int key = tile * kKeyTile + (group + piece) * kPlaces;
      const int page = page_of(key);
      const char* source = head + page_offset(p, page) + page_place(p, key) * kRowBytes;
      const u32 target = stage + (group + piece) * kPlaces * kRowBytes;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int chunk = first + i * kThreads, row = chunk / (kRowBytes / 16);
        const bool valid = page >= 0 && static_cast<u32>(key + row - begin) < keys_inside;
        cp_async_16_or_zero(target + swizzled<kRowBytes>(row, chunk % (kRowBytes / 16)), source + chunk * 16, valid);
      }
    }
    if (kFp8 && !values) load_scales(stage + kTileBytes);
  }

  // Of 64 keys, then of their values.
  __device__ __forceinline__ void load_scales(u32 target) const {
    if (threadIdx.x >= 2 * kKeyTile) return;
    const int key = tile * kKeyTile + threadIdx.x % kKeyTile, page = page_of(key);
    const char* source = head_of(threadIdx.x >= kKeyTile) + page_offset(p, page) + (kRowBytes << p.page_shift);
    cp_async_4_or_zero(target + threadIdx.x * 4, source + page_place(p, key) * 4,
                       page >= 0 && static_cast<u32>(key - begin) < static_cast<u32>(end - begin));
  }
};

// 16 bytes of a query row, or zeros.  For e4m3 keys the elements of 16 are stored in the order in which unpack_e4m3 yields
// a key's bytes to a lane: its mma operands hold elements (4m, 4m + 2) and (4m + 1, 4m + 3).
template <typename T, int D, bool kFp8>
__device__ __forceinline__ void load_query_chunk(const T* source, bool valid, int row, int chunk, u32 target,
                                                 char* target_pointer) {
  if constexpr (!kFp8) {
    cp_async_16_or_zero(target + swizzled<D * 2>(row, chunk), source, valid);
  } else {
    // Members 2 * (chunk % 2) and + 1 of the 16: their first operands lie in chunk 0 of it, their second in chunk 1.
    uint4 words = valid ? *reinterpret_cast<const uint4*>(source) : make_uint4(0, 0, 0, 0);
    const int member = chunk % 2 * 2;
    char* low = target_pointer + swizzled<D * 2>(row, chunk & ~1) + member * 4;
    char* high = target_pointer + swizzled<D * 2>(row, chunk | 1) + member * 4;
    const uint2 even = {__byte_perm(words.x, words.y, 0x5410), __byte_perm(words.z, words.w, 0x5410)};
    const uint2 odd = {__byte_perm(words.x, words.y, 0x7632), __byte_perm(words.z, words.w, 0x7632)};
    *reinterpret_cast<uint2*>(low) = even;
    *reinterpret_cast<uint2*>(high) = odd;
  }
}

// The query rows of a tile.
template <typename T, int D, bool kFp8, int kThreads>
__device__ __forceinline__ void load_query(const PagedPrefillParams& p, const SequenceRows& rows, int kv_head,
                                           int first_row, int tile_rows, u32 target, char* target_pointer) {
  constexpr int kChunks = D * 2 / 16;
  const int num_rows = rows.tokens * p.group;
  for (int i = threadIdx.x; i < tile_rows * kChunks; i += kThreads) {
    const int row = i / kChunks, chunk = i % kChunks, packed = first_row + row;
    const bool valid = packed < num_rows;
    const int token = valid ? packed / p.group : 0, head = kv_head * p.group + (valid ? packed % p.group : 0);
    const T* source = static_cast<const T*>(p.query) + (rows.query_start + token) * p.query_stride +
                      static_cast<i64>(head) * D + chunk * 8;
    load_query_chunk<T, D, kFp8>(source, valid, row, chunk, target, target_pointer);
  }
}

// ---- products ------------------------------------------------------------------------------------------------------

// scores[t][n] (rows of tile t, keys 8 n..) = query . keys.
template <typename T, typename KV, int D, int kRowTiles>
__device__ __forceinline__ void multiply_keys(float (&scores)[kRowTiles][8][4], u32 query, int first_row, u32 keys) {
  const int lane = threadIdx.x % kWarp, line = lane % 8, part = lane / 8;
  u32 query_lane = query + swizzled<D * 2>(first_row + part % 2 * 8 + line, part / 2);
  const u32 keys_lane =
      keys + (sizeof(KV) == 2 ? swizzled<D * 2>(part / 2 * 8 + line, part % 2) : swizzled<D>(lane, 0));
  asm volatile("" : "+r"(query_lane));  // or the compiler keeps D / 16 addresses in registers all the time
#pragma unroll
  for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[t][n][i] = 0.0f;
#pragma unroll(sizeof(KV) == 1 ? 2 : D / 16)
  for (int step = 0; step < D / 16; ++step) {
    u32 a[kRowTiles][4];
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t)
      ldmatrix_x4(a[t], chunks_on(query_lane, step * 2) + t * 16 * (D * 2));
    if constexpr (sizeof(KV) == 2) {
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        u32 b[4];
        ldmatrix_x4(b, chunks_on(keys_lane, step * 2) + pair * 16 * (D * 2));
        const u32 low[2] = {b[0], b[1]}, high[2] = {b[2], b[3]};
#pragma unroll
        for (int t = 0; t < kRowTiles; ++t) {
          mma_16816<T>(scores[t][pair * 2], a[t], low);
          mma_16816<T>(scores[t][pair * 2 + 1], a[t], high);
        }
      }
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        u32 bytes[4];
        ldmatrix_x4(bytes, chunks_on(keys_lane, step) + half * 32 * D);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          u32 b[2];
          unpack_e4m3<T>(bytes[n], b[0], b[1]);
#pragma unroll
          for (int t = 0; t < kRowTiles; ++t) mma_16816<T>(scores[t][half * 4 + n], a[t], b);
        }
      }
    }
  }
}

// out[t][n] += weights . values, for 8 * kColumnTiles columns from first_column on.  e4m3: column tile 2 b holds the
// even and 2 b + 1 the odd columns of 16 (see unpack_e4m3 and `column_pair`).
template <typename T, typename KV, int D, int kRowTiles, int kColumnTiles>
__device__ __forceinline__ void multiply_values(float (&out)[kRowTiles][kColumnTiles][4],
                                                const u32 (&weights)[kRowTiles][4][4], u32 values, int first_column) {
  const int lane = threadIdx.x % kWarp, line = lane % 8, part = lane / 8;
  constexpr int kRowBytes = D * static_cast<int>(sizeof(KV));
  const u32 values_lane =
      values + swizzled<kRowBytes>(part % 2 * 8 + line, first_column * static_cast<int>(sizeof(KV)) / 16 + part / 2);
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    if constexpr (sizeof(KV) == 2) {
#pragma unroll
      for (int pair = 0; pair < kColumnTiles / 2; ++pair) {
        u32 b[4];
        ldmatrix_x4_trans(b, chunks_on(values_lane, pair * 2) + step * 16 * kRowBytes);
        const u32 low[2] = {b[0], b[1]}, high[2] = {b[2], b[3]};
#pragma unroll
        for (int t = 0; t < kRowTiles; ++t) {
          mma_16816<T>(out[t][pair * 2], weights[t][step], low);
          mma_16816<T>(out[t][pair * 2 + 1], weights[t][step], high);
        }
      }
    } else {
#pragma unroll
      for (int quad = 0; quad < kColumnTiles / 4; ++quad) {
        u32 bytes[4];
        ldmatrix_x4_trans(bytes, chunks_on(values_lane, quad * 2) + step * 16 * kRowBytes);
#pragma unroll
        for (int block = 0; block < 2; ++block) {
          u32 even[2], odd[2];
          unpack_e4m3<T>(bytes[block * 2], even[0], odd[0]);
          unpack_e4m3<T>(bytes[block * 2 + 1], even[1], odd[1]);
#pragma unroll
          for (int t = 0; t < kRowTiles; ++t) {
            mma_16816<T>(out[t][quad * 4 + block * 2], weights[t][step], even);
            mma_16816<T>(out[t][quad * 4 + block * 2 + 1], weights[t][step], odd);
          }
        }
      }
    }
  }
}

// Neighbouring columns among a lane's accumulators: pair j (0, 1) of block b of 16 columns, row half h (0: line,
// 1: line + 8).  `column` counts from the block's first.
struct ColumnPair {
  float x, y;
  int column;
};

template <bool kFp8, int kColumnTiles>
__device__ __forceinline__ ColumnPair column_pair(const float (&out)[kColumnTiles][4], int block, int j, int h) {
  const int member = threadIdx.x % 4;
  if constexpr (kFp8) return {out[block * 2][h * 2 + j], out[block * 2 + 1][h * 2 + j], member * 4 + j * 2};
  return {out[block * 2 + j][h * 2], out[block * 2 + j][h * 2 + 1], j * 8 + member * 2};
}

}  // namespace edgellm
