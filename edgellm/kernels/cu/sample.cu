// Choosing a token for every row of logits: greedy, or temperature, top-k, top-p, min-p and one draw.
// Axes: grid x = chunks of kChunk token ids, grid y = rows; row r reads logits row row_index[r] (r without an index).
// Three kernels, in this order on one stream; rows that are done pass through the later ones at once:
//   sample_argmax  largest logit of each row, lowest id among equals; greedy rows end here
//   sample_filter  top-k and top-p of rows that have one: a histogram over (largest - logit), counts and weights a bin.
//                  The last block of a row finds the bin where a filter's edge is; with few tokens down to it, they
//                  are left to the next kernel, otherwise it looks for the edge in the bin.
//   sample_draw    few tokens: gathers them, and the last block filters and draws.  Many: weights of kept tokens by
//                  chunk, then the token where the running sum passes the random number.
// Edges are found by bisection over exact integer sums (logits.cuh), never by sorting.
#include "logits.cuh"

namespace edgellm {

constexpr int kBins = 2048;
constexpr int kGathered = 2048;        // most tokens in shared memory
constexpr int kFew = 512;              // most tokens that one warp filters and draws from
constexpr double kLowestLog = 40.0;    // weights below exp(-40) are less than half a unit: nothing
constexpr int kPartBits = 19;          // a weight in three parts, whose sums over a chunk fit 32 bits
constexpr int kBinsPerThread = kBins / kLogitThreads;

enum Status { kChosen = 0, kNanFound = 1, kInfinityFound = 2, kNothingLeft = 3 };

struct SampleParams {
  const void* logits;
  const int* row_index;        // (L,) or null: row r
  const double* temperature;   // (L,) or null: every row is greedy
  const int* top_k;
  const double* top_p;
  const double* min_p;
  const i64* seed;
  const i64* position;
  int* token_ids;              // (L,); -status where nothing could be chosen
  int* status;                 // (L,) or null
  void* workspace;             // row_bytes a row, zero before the first use, left as the next use needs it
  i64 row_stride;              // elements
  i64 row_bytes;
  int vocab;
};

// What sample_draw has to do with a row.
enum Stage { kDone = 0, kDrawFromMany = 1, kDrawFromFew = 2 };

// What the kernels of one call tell each other about a row.
struct alignas(16) RowState {
  double largest, least;  // of the finite logits
  u64 kept_key;           // tokens are kept above this key, and of equal ones with ids up to kept_id
  u64 kept_units;         // likewise by weight
  Mass total;             // few: what top-p takes its share of, where has_total
  int kept_id, kept_units_id;
  int stage;
  int last_bin;           // few: gather bins up to it
  int has_total;
  int num_gathered;       // 0 between calls
  int arrived[3];         // likewise
};

constexpr int kStateBytes = 128;
static_assert(sizeof(RowState) <= kStateBytes, "the rest of a row's workspace begins behind its state");

struct Workspace {
  RowState* state;
  u64* bin_low;        // (kBins,) sums of the low and high parts of the weights in a bin; 0 between calls, as counts
  u64* bin_high;
  u64* gathered_keys;  // (kFew,)
  u64* chunk_largest;  // (chunks,) from here
  u64* chunk_least;
  u64* chunk_low;
  u64* chunk_high;
  u32* bin_count;      // (kBins,)
  int* gathered_ids;   // (kFew,)
  int* chunk_id;
};

__device__ __forceinline__ Workspace workspace_of(const SampleParams& p, int row) {
  const int chunks = gridDim.x;
  u8* base = static_cast<u8*>(p.workspace) + row * p.row_bytes;
  Workspace w;
  w.state = reinterpret_cast<RowState*>(base);
  w.bin_low = reinterpret_cast<u64*>(base + kStateBytes);
  w.bin_high = w.bin_low + kBins;
  w.gathered_keys = w.bin_high + kBins;
  w.chunk_largest = w.gathered_keys + kFew;
  w.chunk_least = w.chunk_largest + chunks;
  w.chunk_low = w.chunk_least + chunks;
  w.chunk_high = w.chunk_low + chunks;
  w.bin_count = reinterpret_cast<u32*>(w.chunk_high + chunks);
  w.gathered_ids = reinterpret_cast<int*>(w.bin_count + kBins);
  w.chunk_id = w.gathered_ids + kFew;
  return w;
}

template <typename T>
__device__ __forceinline__ const T* row_logits(const SampleParams& p, int row) {
  const i64 source = p.row_index == nullptr ? row : p.row_index[row];
  return static_cast<const T*>(p.logits) + source * p.row_stride;
}

// ---- the largest logit ----------------------------------------------------------------------------------------------

template <typename T>
__device__ void finish_argmax(const SampleParams& p, int row, const Workspace& w, Token<typename LogitType<T>::Key> best,
                              typename LogitType<T>::Key least) {
  using Type = LogitType<T>;
  const int status = best.key == Type::kNan              ? kNanFound
                     : best.key == Type::kInfinity       ? kInfinityFound
                     : best.key <= Type::kMinusInfinity ? kNothingLeft
                                                         : kChosen;
  const bool greedy = p.temperature == nullptr || p.temperature[row] == 0.0;
  if (status != kChosen || greedy) p.token_ids[row] = status == kChosen ? best.id : -status;
  if (p.status != nullptr) p.status[row] = status;
  RowState& state = *w.state;
  state.largest = static_cast<double>(key_value(best.key));
  state.least = static_cast<double>(key_value(least));
  state.kept_key = state.kept_units = 0;
  state.kept_id = state.kept_units_id = kLastId;
  state.stage = greedy || status != kChosen ? kDone : kDrawFromMany;
  state.has_total = 0;
}

template <typename T>
__global__ void __launch_bounds__(kLogitThreads, 2) sample_argmax(const __grid_constant__ SampleParams p) {
  using Type = LogitType<T>;
  using Key = typename Type::Key;
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int row = blockIdx.y, chunks = gridDim.x;
  Token<Key> best = {0, kLastId};
  Key least = Type::kNan;
  for_each_of_chunk(row_logits<T>(p, row), blockIdx.x, p.vocab, [&](int, int id, typename Type::Value value) {
    const Key key = order_key(value);
    if (key > best.key) best = {key, id};
    if (key > Type::kMinusInfinity) least = Least()(least, key);
  });
  best = first_warp_reduce(best, First());
  least = first_warp_reduce(least, Least());
  if (threadIdx.x >= kWarp) return;
  const Workspace w = workspace_of(p, row);
  if (chunks > 1) {
    if (threadIdx.x == 0) {
      w.chunk_largest[blockIdx.x] = best.key;
      w.chunk_least[blockIdx.x] = least;
      w.chunk_id[blockIdx.x] = best.id;
    }
    if (!is_last_first_warp(&w.state->arrived[0], chunks)) return;
    for (int chunk = threadIdx.x; chunk < chunks; chunk += kWarp) {
      best = First()(best, Token<Key>{static_cast<Key>(w.chunk_largest[chunk]), w.chunk_id[chunk]});
      least = Least()(least, static_cast<Key>(w.chunk_least[chunk]));
    }
    best = warp_reduce(best, First());
    least = warp_reduce(least, Least());
  }
  if (threadIdx.x == 0) finish_argmax<T>(p, row, w, best, least);
}

// ---- a row's weights ------------------------------------------------------------------------------------------------

template <typename Key>
struct Cut {
  Key key;
  int id;
  __device__ __forceinline__ bool keeps(Key other, int other_id) const {
    return other > key || (other == key && other_id <= id);
  }
};

// exp(x) for x in [-41, 0], to about one unit in the last place; 1 at 0.  Eleven float64 operations: x = k ln(2) / 32 + r
// with |r| <= ln(2) / 64, 2^(k / 32) from a table, exp(r) - 1 by its series up to r^6.
__device__ const double kPowersOfTwo[32] = {
    1.0, 1.0218971486541166, 1.0442737824274138, 1.0671404006768237,
    1.0905077326652577, 1.1143867425958924, 1.1387886347566916, 1.1637248587775775,
    1.189207115002721, 1.215247359980469, 1.241857812073484, 1.2690509571917332,
    1.2968395546510096, 1.3252366431597413, 1.3542555469368927, 1.383909881963832,
    1.4142135623730951, 1.4451808069770467, 1.4768261459394993, 1.5091644275934228,
    1.5422108254079407, 1.5759808451078865, 1.6104903319492543, 1.645755478153965,
    1.681792830507429, 1.718619298122478, 1.7562521603732995, 1.7947090750031072,
    1.8340080864093424, 1.8741676341103, 1.9152065613971474, 1.9571441241754002,
};
__device__ __forceinline__ double exponential(double x) {
  constexpr double kShift = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer, in the low bits
  const double shifted = __fma_rn(x, 46.16624130844683, kShift);
  const int k = __double2loint(shifted);
  const double whole = shifted - kShift;
  const double r = __fma_rn(whole, -5.9631716539705866e-12, __fma_rn(whole, -0.02166084938653512, x));
  const double square = r * r;
  double series = __fma_rn(r, 1.0 / 720.0, 1.0 / 120.0);
  series = __fma_rn(r, series, 1.0 / 24.0);
  series = __fma_rn(r, series, 1.0 / 6.0);
  series = __fma_rn(r, series, 0.5);
  series = __fma_rn(square, series, r);
  const double power = __ldg(&kPowersOfTwo[k & 31]);
  const double result = __fma_rn(power, series, power);
  return __hiloint2double(__double2hiint(result) + (k >> 5) * 0x100000, __double2loint(result));
}

// Weights and bins of a row's tokens.  Bin b holds logits that are about b bin widths below the largest; the number
// never falls as the logit falls.  -1: a weight of nothing.
template <typename T>
struct WeighedRow {
  using Value = typename LogitType<T>::Value;
  const T* logits;
  int vocab;
  Value largest;
  double inverse;
  float cutoff, scale;

  __device__ WeighedRow(const SampleParams& p, int row, const RowState& state) {
    const double temperature = p.temperature[row];
    logits = row_logits<T>(p, row);
    vocab = p.vocab;
    largest = static_cast<Value>(state.largest);
    inverse = fmin(1.0 / temperature, 1e300);
    const double reach = fmin(kLowestLog * temperature, 3e38);  // a distance of infinity is beyond every reach
    cutoff = static_cast<float>(reach);
    const float span = static_cast<float>(fmin(reach, state.largest - state.least));
    scale = span > 1e-30f ? kBins / span : 0.0f;
  }
  __device__ __forceinline__ float below(Value value) const { return static_cast<float>(largest - value); }
  __device__ __forceinline__ int bin(Value value) const {
    const float depth = below(value);
    return depth <= cutoff ? min(static_cast<int>(depth * scale), kBins - 1) : -1;
  }
  // The same question without a conversion, of which a multiprocessor does few at a time.
  __device__ __forceinline__ bool in_bins(Value value, int first, int last) const {
    const float depth = below(value), place = depth * scale;
    return depth <= cutoff && (first == 0 || place >= static_cast<float>(first)) &&
           (last >= kBins - 1 || place < static_cast<float>(last + 1));
  }
  __device__ __forceinline__ u64 units(Value value) const {
    if (!(below(value) <= cutoff)) return 0;
    double x = (static_cast<double>(value) - static_cast<double>(largest)) * inverse;
    if constexpr (sizeof(Value) == sizeof(double)) x = fmax(x, -41.0);  // `below` rounds tiny distances to nothing
    return units_of(exponential(x));
  }
  // f(id, value) for a chunk's tokens in bins [first, last], by all threads of the block.  The code of f stands in one
  // place: few tokens are wanted, and what was just loaded is near when it is loaded again.
  template <typename F>
  __device__ __forceinline__ void each_in_bins(int chunk, int first, int last, F f) const {
    u32 wanted = 0;
    for_each_of_chunk(logits, chunk, vocab, [&](int i, int, Value value) {
      if (in_bins(value, first, last)) wanted |= 1u << i;
    });
    for (; wanted != 0; wanted &= wanted - 1) {
      const int id = chunk * kChunk + (__ffs(wanted) - 1) * kLogitThreads + static_cast<int>(threadIdx.x);
      f(id, logit_value(logits[id]));
    }
  }
  template <typename F>
  __device__ __forceinline__ void each_in_bins(int first, int last, F f) const {
    for (int chunk = 0; chunk * kChunk < vocab; ++chunk) each_in_bins(chunk, first, last, f);
  }
};

// ---- the random number ----------------------------------------------------------------------------------------------

// Philox4x32-10; key = seed, counter = (position, purpose 0, 0), 53 bits.  As edgellm/sampling/philox.py.
__device__ inline double uniform(u64 seed, u64 position) {
  u32 word0 = static_cast<u32>(position), word1 = static_cast<u32>(position >> 32), word2 = 0, word3 = 0;
  u32 key0 = static_cast<u32>(seed), key1 = static_cast<u32>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const u64 product0 = static_cast<u64>(word0) * 0xD2511F53u, product1 = static_cast<u64>(word2) * 0xCD9E8D57u;
    word0 = static_cast<u32>(product1 >> 32) ^ word1 ^ key0;
    word2 = static_cast<u32>(product0 >> 32) ^ word3 ^ key1;
    word1 = static_cast<u32>(product1);
    word3 = static_cast<u32>(product0);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  const u64 bits = (static_cast<u64>(word0 >> 5) << 26) + (word1 >> 6);
  return static_cast<double>(bits) * (1.0 / 9007199254740992.0);
}

// Where a running sum has passed the random number: from some token on, and never on one without weight.
struct DrawnPoint {
  Mass total;
  double target;
  __device__ DrawnPoint(const SampleParams& p, int row, Mass all) : total(all) {
    target = uniform(static_cast<u64>(p.seed[row]), static_cast<u64>(p.position[row])) * to_double(all);
  }
  __device__ __forceinline__ bool passed(Mass running) const {
    return to_double(running) > target || same(running, total);
  }
};

// The least weight that min-p keeps; the largest weight is 1.
__device__ __forceinline__ u64 least_units(double min_p) {
  return __double2ull_ru(min_p * static_cast<double>(1ull << kWeightBits));
}

// ---- edges of filters -----------------------------------------------------------------------------------------------

// Tokens in shared memory, for the first warp.  A weight of 0: dropped.
template <typename T>
struct TokenList {
  using Key = typename LogitType<T>::Key;
  using Group = FirstWarp;
  u64* units;
  Key* keys;
  int* ids;
  int size;

  __device__ TokenList(u8* shared, int tokens) : size(tokens) {
    units = reinterpret_cast<u64*>(shared);
    keys = reinterpret_cast<Key*>(units + kGathered);
    ids = reinterpret_cast<int*>(keys + kGathered);
  }
  static constexpr int kBytes = kGathered * static_cast<int>(sizeof(u64) + sizeof(Key) + sizeof(int));
  template <typename F>
  __device__ __forceinline__ void each(F f) const {
    for (int i = threadIdx.x; i < size; i += kWarp) f(keys[i], ids[i], [&] { return units[i]; });
  }
  // Tokens for which keeps(key, id, units) does not hold lose their weight.
  template <typename F>
  __device__ __forceinline__ void keep_where(F keeps) const {
    for (int i = threadIdx.x; i < size; i += kWarp)
      if (!keeps(keys[i], ids[i], units[i])) units[i] = 0;
  }
};

// Tokens of one bin, read from the row again each time by the whole block: for bins with too many to gather.
template <typename T>
struct BinOfRow {
  using Key = typename LogitType<T>::Key;
  using Group = WholeBlock;
  const WeighedRow<T>& row;
  Cut<Key> kept;
  int bin;
  template <typename F>
  __device__ __forceinline__ void each(F f) const {
    row.each_in_bins(bin, bin, [&](int id, typename LogitType<T>::Value value) {
      const Key key = order_key(value);
      if (kept.keeps(key, id)) f(key, id, [&] { return row.units(value); });
    });
  }
};

template <typename Tokens, typename Where>
__device__ __forceinline__ int count_where(const Tokens& tokens, Where where) {
  int count = 0;
  tokens.each([&](auto key, int id, auto units) { count += where(key, id, units) ? 1 : 0; });
  return Tokens::Group::reduce(count, Sum());
}
template <typename Tokens, typename Where>
__device__ __forceinline__ Mass mass_where(const Tokens& tokens, Where where) {
  Mass mass = {0, 0};
  tokens.each([&](auto key, int id, auto units) {
    if (where(key, id, units)) mass = mass + mass_of(units());
  });
  return Tokens::Group::reduce(mass, Sum());
}

// Least and largest key.
template <typename Tokens>
__device__ __forceinline__ void key_range(const Tokens& tokens, typename Tokens::Key& low, typename Tokens::Key& high) {
  low = static_cast<typename Tokens::Key>(~0ull);
  high = 0;
  tokens.each([&](auto key, int, auto) {
    low = Least()(low, key);
    high = Largest()(high, key);
  });
  low = Tokens::Group::reduce(low, Least());
  high = Tokens::Group::reduce(high, Largest());
}

// The id of the n-th token, by id, of those for which `where` holds.
template <typename Tokens, typename Where>
__device__ __forceinline__ int nth_id(const Tokens& tokens, int vocab, int n, Where where) {
  int low = 0, high = vocab - 1;
  while (low < high) {
    const int middle = low + (high - low) / 2;
    const int count =
        count_where(tokens, [&](auto key, int id, auto units) { return id <= middle && where(key, id, units); });
    if (count >= n) high = middle;
    else low = middle + 1;
  }
  return low;
}

// Exactly `wanted` tokens, of equal ones those with lower ids.
template <typename Tokens>
__device__ __noinline__ Cut<typename Tokens::Key> cut_by_count(const Tokens& tokens, int vocab, int wanted) {
  using Key = typename Tokens::Key;
  Key low, high;
  key_range(tokens, low, high);
  while (low < high) {
    const Key middle = high - (high - low) / 2;
    const int count = count_where(tokens, [&](Key key, int, auto) { return key >= middle; });
    if (count == wanted) return {middle, kLastId};
    if (count > wanted) low = middle;
    else high = middle - 1;
  }
  const int above = count_where(tokens, [&](Key key, int, auto) { return key > low; });
  const int equal = count_where(tokens, [&](Key key, int, auto) { return key == low; });
  if (above + equal <= wanted) return {low, kLastId};
  return {low, nth_id(tokens, vocab, wanted - above, [&](Key key, int, auto) { return key == low; })};
}

// The fewest tokens that, with `before`, weigh at least `goal` units: by weight, of equal ones those with lower ids.
template <typename Tokens>
__device__ __noinline__ Cut<u64> cut_by_mass(const Tokens& tokens, int vocab, Mass before, double goal) {
  using Key = typename Tokens::Key;
  Key low, high;
  key_range(tokens, low, high);
  while (low < high) {
    const Key middle = high - (high - low) / 2;
    const Mass mass = mass_where(tokens, [&](Key key, int, auto) { return key >= middle; });
    if (to_double(before + mass) >= goal) low = middle;
    else high = middle - 1;
  }
  // Logits may differ and weights be equal: ids decide among equal weights.
  u64 edge = 0;
  tokens.each([&](Key key, int, auto units) {
    if (key == low) edge = Largest()(edge, units());
  });
  edge = Tokens::Group::reduce(edge, Largest());
  before = before + mass_where(tokens, [&](Key, int, auto units) { return units() > edge; });
  const int equal = count_where(tokens, [&](Key, int, auto units) { return units() == edge; });
  int fewest = 1, most = equal;
  while (fewest < most) {
    const int middle = fewest + (most - fewest) / 2;
    if (to_double(before + times(mass_of(edge), middle)) >= goal) most = middle;
    else fewest = middle + 1;
  }
  if (fewest >= equal) return {edge, kLastId};
  return {edge, nth_id(tokens, vocab, fewest, [&](Key, int, auto units) { return units() == edge; })};
}

// What the first warp found, to the whole block.
template <typename V>
__device__ __forceinline__ V from_first_warp(V value) {
  __shared__ V shared;
  if (threadIdx.x == 0) shared = value;
  __syncthreads();
  value = shared;
  __syncthreads();
  return value;
}

// ---- top-k and top-p ------------------------------------------------------------------------------------------------

struct Histogram {
  u32 count[kBins];
  u32 parts[3][kBins];
};

// The bin in which a filter's edge is, and what is above and in it.
struct BinEdge {
  Tally above, inside;
  int bin;
};

// The bins of a row, kBinsPerThread neighbours a thread; read again when they are looked at, to spare registers.
struct BinScan {
  const Workspace& w;
  Tally above, total;

  __device__ explicit BinScan(const Workspace& workspace) : w(workspace) {
    Tally sum = {};
    for (int i = 0; i < kBinsPerThread; ++i) sum = sum + tally(bin_of_thread(i));
    above = block_scan(sum, total);
  }
  __device__ __forceinline__ static int bin_of_thread(int i) {
    return static_cast<int>(threadIdx.x) * kBinsPerThread + i;
  }
  __device__ __forceinline__ Tally tally(int bin) const {
    return {static_cast<int>(w.bin_count[bin]), {w.bin_low[bin], w.bin_high[bin]}};
  }
  // The first bin with which `reached` holds of the sum so far; it holds of the total.
  template <typename Reached>
  __device__ __forceinline__ BinEdge edge(Reached reached) const {
    __shared__ BinEdge found;
    Tally before = above;
    for (int i = 0; i < kBinsPerThread; ++i) {
      const int bin = bin_of_thread(i);
      const Tally own = tally(bin), after = before + own;
      if (!reached(before) && reached(after)) found = {before, own, bin};
      before = after;
    }
    __syncthreads();
    const BinEdge copy = found;
    __syncthreads();
    return copy;
  }
  // Leaves the bins empty for the next call.
  __device__ __forceinline__ void clear() const {
    for (int i = 0; i < kBinsPerThread; ++i) {
      const int bin = bin_of_thread(i);
      w.bin_count[bin] = 0;
      w.bin_low[bin] = w.bin_high[bin] = 0;
    }
  }
};

template <typename T>
__device__ __forceinline__ void add_to_histogram(const WeighedRow<T>& row, Histogram& bins, bool weigh) {
  constexpr u64 kPart = (1ull << kPartBits) - 1;
  for_each_of_chunk(row.logits, blockIdx.x, row.vocab, [&](int, int, typename LogitType<T>::Value value) {
    const int bin = row.bin(value);
    if (bin < 0) return;
    atomicAdd(&bins.count[bin], 1u);
    if (!weigh) return;
    const Mass mass = mass_of(row.units(value));
    const u32 low = static_cast<u32>(mass.low & kPart), middle = static_cast<u32>(mass.low >> kPartBits);
    if (low) atomicAdd(&bins.parts[0][bin], low);
    if (middle) atomicAdd(&bins.parts[1][bin], middle);
    if (mass.high) atomicAdd(&bins.parts[2][bin], static_cast<u32>(mass.high));
  });
}

__device__ __forceinline__ void add_to_row(const Histogram& bins, const Workspace& w) {
  for (int bin = threadIdx.x; bin < kBins; bin += kLogitThreads) {
    if (bins.count[bin] == 0) continue;
    atomicAdd(&w.bin_count[bin], bins.count[bin]);
    const u64 low = bins.parts[0][bin] + (static_cast<u64>(bins.parts[1][bin]) << kPartBits);
    if (low) atomicAdd(&w.bin_low[bin], low);
    if (bins.parts[2][bin]) atomicAdd(&w.bin_high[bin], static_cast<u64>(bins.parts[2][bin]));
  }
}

// The last block of a row: finds the bins of the filters' edges, and the edges in bins with too much above them.
template <typename T>
class RowFilter {
  using Key = typename LogitType<T>::Key;

 public:
  __device__ RowFilter(const SampleParams& p, int row, const Workspace& w, const WeighedRow<T>& weighed, u8* shared)
      : state_(*w.state), weighed_(weighed), bins_(w), list_(shared, 0), top_k_(p.top_k[row]), top_p_(p.top_p[row]) {}

  __device__ void run() {
    const bool limited = top_k_ > 0 && top_k_ < bins_.total.count;
    if (limited) {
      edge_ = bins_.edge([&](Tally sum) { return sum.count >= top_k_; });
      if (!is_few(edge_)) find_top_k();
    }
    if (limited ? is_few(edge_) || top_k_ <= kFew : bins_.total.count <= kFew) {
      leave(kDrawFromFew, limited ? edge_.bin : kBins - 1);
    } else if (top_p_ < 1.0) {
      find_top_p(limited);
    } else {
      leave(kDrawFromMany, 0);
    }
    bins_.clear();
  }

 private:
  __device__ __forceinline__ static bool is_few(const BinEdge& edge) {
    return edge.above.count + edge.inside.count <= kFew;
  }

  __device__ void find_top_k() {
    const int wanted = top_k_ - edge_.above.count;
    if (edge_.inside.count <= kGathered) {
      gather(edge_.bin);
      Cut<Key> cut = {0, kLastId};
      if (threadIdx.x < kWarp) cut = cut_by_count(list_, weighed_.vocab, wanted);
      kept_ = from_first_warp(cut);
    } else {
      kept_ = cut_by_count(BinOfRow<T>{weighed_, kept_, edge_.bin}, weighed_.vocab, wanted);
    }
  }

  __device__ void find_top_p(bool limited) {
    Mass total = bins_.total.mass;
    if (limited) {
      const BinOfRow<T> tokens = {weighed_, kept_, edge_.bin};
      total = edge_.above.mass + mass_where(tokens, [](Key, int, auto) { return true; });
    }
    const double goal = top_p_ * to_double(total);
    const BinEdge edge = bins_.edge([&](Tally sum) { return to_double(sum.mass) >= goal; });
    if (is_few(edge)) {
      if (threadIdx.x == 0) state_.total = total;
      if (threadIdx.x == 0) state_.has_total = 1;
      leave(kDrawFromFew, edge.bin);
      return;
    }
    if (edge.inside.count <= kGathered) {
      gather(edge.bin);
      Cut<u64> cut = {0, kLastId};
      if (threadIdx.x < kWarp) cut = cut_by_mass(list_, weighed_.vocab, edge.above.mass, goal);
      kept_units_ = from_first_warp(cut);
    } else {
      kept_units_ = cut_by_mass(BinOfRow<T>{weighed_, kept_, edge.bin}, weighed_.vocab, edge.above.mass, goal);
    }
    leave(kDrawFromMany, 0);
  }

  // The kept tokens of a bin to the list, in any order: nothing depends on it.
  __device__ void gather(int bin) {
    __shared__ int size;
    __syncthreads();
    if (threadIdx.x == 0) size = 0;
    __syncthreads();
    weighed_.each_in_bins(bin, bin, [&](int id, typename LogitType<T>::Value value) {
      const Key key = order_key(value);
      if (!kept_.keeps(key, id)) return;
      const int place = atomicAdd(&size, 1);
      list_.keys[place] = key;
      list_.ids[place] = id;
      list_.units[place] = weighed_.units(value);
    });
    __syncthreads();
    list_.size = size;
  }

  __device__ void leave(Stage stage, int last_bin) {
    if (threadIdx.x != 0) return;
    state_.kept_key = kept_.key;
    state_.kept_id = kept_.id;
    state_.kept_units = kept_units_.key;
    state_.kept_units_id = kept_units_.id;
    state_.last_bin = last_bin;
    state_.stage = stage;
  }

  RowState& state_;
  const WeighedRow<T>& weighed_;
  const BinScan bins_;
  TokenList<T> list_;
  const int top_k_;
  const double top_p_;
  BinEdge edge_ = {};
  Cut<Key> kept_ = {0, kLastId};
  Cut<u64> kept_units_ = {0, kLastId};
};

/* Blocks of a multiprocessor that registers are kept for: two leave 64 a thread, which float logits alone do with. */
template <typename T>
struct Resident {
  static constexpr int kBlocks = 1;
};
template <>
struct Resident<float> {
  static constexpr int kBlocks = 2;
};

template <typename T>
__global__ void __launch_bounds__(kLogitThreads, Resident<T>::kBlocks) sample_filter(const __grid_constant__ SampleParams p) {
  constexpr int kHistogramBytes = static_cast<int>(sizeof(Histogram));
  constexpr int kBytes = TokenList<T>::kBytes > kHistogramBytes ? TokenList<T>::kBytes : kHistogramBytes;
  __shared__ alignas(16) u8 shared[kBytes];
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int row = blockIdx.y;
  const Workspace w = workspace_of(p, row);
  const int top_k = p.top_k[row];
  const bool has_top_k = top_k > 0 && top_k < p.vocab, has_top_p = p.top_p[row] < 1.0;
  if (w.state->stage == kDone || !(has_top_k || has_top_p)) return;
  const WeighedRow<T> weighed(p, row, *w.state);
  Histogram& bins = *reinterpret_cast<Histogram*>(shared);
  for (int i = threadIdx.x; i < static_cast<int>(sizeof(Histogram) / sizeof(u32)); i += kLogitThreads)
    reinterpret_cast<u32*>(shared)[i] = 0;
  __syncthreads();
  // What top-k leaves of few is weighed when it has been gathered.
  add_to_histogram(weighed, bins, !has_top_k || top_k > kFew);
  __syncthreads();
  add_to_row(bins, w);
  if (!is_last_block(&w.state->arrived[1], gridDim.x)) return;
  RowFilter<T>(p, row, w, weighed, shared).run();
}

// ---- the draw among few ---------------------------------------------------------------------------------------------

// The kept tokens of this block's chunk in the bins that matter, to the row's list.
template <typename T>
__device__ __forceinline__ void gather_few(const WeighedRow<T>& row, const Workspace& w) {
  const Cut<typename LogitType<T>::Key> kept = {static_cast<typename LogitType<T>::Key>(w.state->kept_key),
                                                w.state->kept_id};
  row.each_in_bins(blockIdx.x, 0, w.state->last_bin, [&](int id, typename LogitType<T>::Value value) {
    const auto key = order_key(value);
    if (!kept.keeps(key, id)) return;
    const int place = atomicAdd(&w.state->num_gathered, 1);
    w.gathered_keys[place] = key;
    w.gathered_ids[place] = id;
  });
}

// By the first warp: what is left of the filters, then the draw.
template <typename T>
__device__ __forceinline__ void draw_from_list(const SampleParams& p, int row, const RowState& state,
                                               const TokenList<T>& list) {
  using Key = typename LogitType<T>::Key;
  const auto all = [](Key, int, auto) { return true; };
  const int top_k = p.top_k[row];
  const double top_p = p.top_p[row], min_p = p.min_p[row];
  if (top_k > 0 && top_k < list.size) {
    const Cut<Key> cut = cut_by_count(list, p.vocab, top_k);
    list.keep_where([&](Key key, int id, u64) { return cut.keeps(key, id); });
  }
  if (top_p < 1.0) {
    const Mass total = state.has_total ? state.total : mass_where(list, all);
    const Cut<u64> cut = cut_by_mass(list, p.vocab, Mass{0, 0}, top_p * to_double(total));
    list.keep_where([&](Key, int id, u64 units) { return cut.keeps(units, id); });
  }
  const u64 least = least_units(min_p);
  list.keep_where([&](Key, int, u64 units) { return units >= least; });
  const DrawnPoint point(p, row, mass_where(list, all));
  int low = 0, high = p.vocab - 1;
  while (low < high) {
    const int middle = low + (high - low) / 2;
    if (point.passed(mass_where(list, [&](Key, int id, auto) { return id <= middle; }))) high = middle;
    else low = middle + 1;
  }
  if (threadIdx.x == 0) p.token_ids[row] = low;
}

template <typename T>
__device__ __forceinline__ void draw_from_few(const SampleParams& p, int row, const WeighedRow<T>& weighed,
                                              const Workspace& w, u8* shared) {
  using Key = typename LogitType<T>::Key;
  const TokenList<T> list(shared, w.state->num_gathered);
  const int i = threadIdx.x;
  if (i < list.size) {
    list.keys[i] = static_cast<Key>(w.gathered_keys[i]);
    list.ids[i] = w.gathered_ids[i];
    list.units[i] = weighed.units(key_value(list.keys[i]));
  }
  __syncthreads();
  if (i == 0) w.state->num_gathered = 0;
  if (i < kWarp) draw_from_list(p, row, *w.state, list);
}
static_assert(kFew <= kLogitThreads, "a thread loads one token");

// ---- the draw among many --------------------------------------------------------------------------------------------

// What the filters left of a row.
template <typename T>
struct KeptRow {
  using Value = typename LogitType<T>::Value;
  using Key = typename LogitType<T>::Key;
  const WeighedRow<T>& row;
  Cut<Key> kept;
  Cut<u64> kept_units;
  u64 least;

  __device__ KeptRow(const SampleParams& p, int index, const WeighedRow<T>& weighed, const RowState& state)
      : row(weighed) {
    kept = {static_cast<Key>(state.kept_key), state.kept_id};
    kept_units = {state.kept_units, state.kept_units_id};
    least = least_units(p.min_p[index]);
  }
  __device__ __forceinline__ Mass mass(int id, Value value) const {
    if (kept.key != 0 && !kept.keeps(order_key(value), id)) return {0, 0};
    const u64 units = row.units(value);
    return units >= least && kept_units.keeps(units, id) ? mass_of(units) : Mass{0, 0};
  }
};

// The chunk where the running sum passes the point, then the token in it.
template <typename T>
__device__ __forceinline__ void draw_token(const SampleParams& p, int row, const Workspace& w, const KeptRow<T>& kept) {
  __shared__ int chunk;
  __shared__ Mass before_chunk;
  const int thread = threadIdx.x;
  Mass mass = {0, 0}, total;
  if (thread < static_cast<int>(gridDim.x)) mass = {w.chunk_low[thread], w.chunk_high[thread]};
  Mass before = block_scan(mass, total);
  const DrawnPoint point(p, row, total);
  if (!point.passed(before) && point.passed(before + mass)) {
    chunk = thread;
    before_chunk = before;
  }
  __syncthreads();
  const int first = chunk * kChunk + thread * kPerThread;
  Mass sum = {0, 0}, inside;
#pragma unroll 1
  for (int id = first; id < min(first + kPerThread, p.vocab); ++id)
    sum = sum + kept.mass(id, logit_value(kept.row.logits[id]));
  before = before_chunk + block_scan(sum, inside);
  if (point.passed(before) || !point.passed(before + sum)) return;
#pragma unroll 1
  for (int id = first; id < min(first + kPerThread, p.vocab); ++id) {
    const Mass after = before + kept.mass(id, logit_value(kept.row.logits[id]));
    if (!point.passed(before) && point.passed(after)) p.token_ids[row] = id;
    before = after;
  }
}

template <typename T>
__device__ __forceinline__ void draw_from_many(const SampleParams& p, int row, const WeighedRow<T>& weighed,
                                               const Workspace& w) {
  const KeptRow<T> kept(p, row, weighed, *w.state);
  Mass mass = {0, 0};
  for_each_of_chunk(weighed.logits, blockIdx.x, p.vocab, [&](int, int id, typename LogitType<T>::Value value) {
    mass = mass + kept.mass(id, value);
  });
  mass = first_warp_reduce(mass, Sum());
  if (threadIdx.x == 0) {
    w.chunk_low[blockIdx.x] = mass.low;
    w.chunk_high[blockIdx.x] = mass.high;
  }
  if (is_last_block(&w.state->arrived[2], gridDim.x)) draw_token(p, row, w, kept);
}

template <typename T>
__global__ void __launch_bounds__(kLogitThreads, Resident<T>::kBlocks) sample_draw(const __grid_constant__ SampleParams p) {
  __shared__ alignas(16) u8 shared[TokenList<T>::kBytes];
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int row = blockIdx.y;
  const Workspace w = workspace_of(p, row);
  const int stage = w.state->stage;
  if (stage == kDone) return;
  const WeighedRow<T> weighed(p, row, *w.state);
  if (stage == kDrawFromMany) {
    draw_from_many(p, row, weighed, w);
    return;
  }
  gather_few(weighed, w);
  if (is_last_block(&w.state->arrived[2], gridDim.x)) draw_from_few(p, row, weighed, w, shared);
}

}  // namespace edgellm
