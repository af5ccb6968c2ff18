// Linear layers on 4-bit weights; axes, units and the walk are in quantised.cuh.
// weight[n, k] = T((q - zero) * scale), q and zero in [0, 15], scale of type T for a group of k.
// A unit is 64 k, a lane's words {block 0 tile 0, block 0 tile 1, block 1 tile 0, block 1 tile 1}.  A word is eight k:
// bits 4 * j hold k 2 * j, bits 16 + 4 * j hold k 2 * j + 1, so that a mask gives a pair of neighbours.
// scales: [panel][group][row of the tile][tile] T.  zeros: [panel][group][row of the tile] bytes, tile 0 in the low half.
#include "quantised.cuh"

namespace edgellm {

template <typename T>
__device__ __forceinline__ u32 multiply2(u32 a, u32 b);
template <>
__device__ __forceinline__ u32 multiply2<f16>(u32 a, u32 b) {
  const __half2 product = __hmul2(*reinterpret_cast<__half2*>(&a), *reinterpret_cast<__half2*>(&b));
  return *reinterpret_cast<const u32*>(&product);
}
template <>
__device__ __forceinline__ u32 multiply2<bf16>(u32 a, u32 b) {
  const __nv_bfloat162 product = __hmul2(*reinterpret_cast<__nv_bfloat162*>(&a), *reinterpret_cast<__nv_bfloat162*>(&b));
  return *reinterpret_cast<const u32*>(&product);
}

template <typename T>
__device__ __forceinline__ u32 subtract2(u32 a, u32 b);
template <>
__device__ __forceinline__ u32 subtract2<f16>(u32 a, u32 b) {
  const __half2 rest = __hsub2(*reinterpret_cast<__half2*>(&a), *reinterpret_cast<__half2*>(&b));
  return *reinterpret_cast<const u32*>(&rest);
}
template <>
__device__ __forceinline__ u32 subtract2<bf16>(u32 a, u32 b) {
  const __nv_bfloat162 rest = __hsub2(*reinterpret_cast<__nv_bfloat162*>(&a), *reinterpret_cast<__nv_bfloat162*>(&b));
  return *reinterpret_cast<const u32*>(&rest);
}

// (word & mask) | bits, in one instruction.
template <u32 kMask>
__device__ __forceinline__ u32 masked_or(u32 word, u32 bits) {
  u32 result;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(word), "n"(kMask), "r"(bits));
  return result;
}

// Nibbles to q - zero, exactly: q below an exponent where the last bit counts one is 128 + q (bf16) or 1024 + q (f16),
// and the zero likewise.
template <typename T>
struct Nibbles;

template <>
struct Nibbles<bf16> {
  static constexpr u32 kOffset = 0x43004300;

  static __device__ __forceinline__ void less_zero(u32 (&pairs)[4], u32 word, u32 zero) {
#pragma unroll
    for (int j = 0; j < 4; ++j) pairs[j] = subtract2<bf16>(masked_or<0x000f000f>(word >> (4 * j), kOffset), zero);
  }
};

template <>
struct Nibbles<f16> {
  static constexpr u32 kOffset = 0x64006400;

  // Odd pairs stay four bits up: 1024 + 16 q, of which a sixteenth less 64 + zero is q - zero.
  static __device__ __forceinline__ void less_zero(u32 (&pairs)[4], u32 word, u32 zero) {
    constexpr u32 k960 = 0x63806380, kSixteenth = 0x2c002c00;
    u32 high_zero = subtract2<f16>(k960, zero);  // -(64 + zero)
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
      const u32 shifted = word >> (4 * j);
      u32 high = masked_or<0x00f000f0>(shifted, kOffset), sixteenth = kSixteenth;
      pairs[j] = subtract2<f16>(masked_or<0x000f000f>(shifted, kOffset), zero);
      const __half2 rest = __hfma2(*reinterpret_cast<__half2*>(&high), *reinterpret_cast<__half2*>(&sixteenth),
                                   *reinterpret_cast<__half2*>(&high_zero));
      pairs[j + 1] = *reinterpret_cast<const u32*>(&rest);
    }
  }
};

template <typename T>
struct Int4 {
  static constexpr int kUnitBlocks = 2;

  struct ScaleSource {
    u32 scales, zeros;  // offsets of the words with those of the lane's rows, of group 0
  };
  struct Scales {
    u32 scale[2], zero[2];  // of each tile's row, twice
  };

  static __device__ __forceinline__ ScaleSource scale_source(const QuantisedParams&, u32 first_group) {
    const u32 row = threadIdx.x % kWarp / 4;
    return {first_group * 32 + row * 4, first_group * 8 + row / 4 * 4};
  }
  static __device__ __forceinline__ void fetch_scales(const QuantisedParams& p, const ScaleSource& source, u32 target,
                                                      u32 group) {
    cp_async_4_or_zero(target, static_cast<const char*>(p.scales) + (source.scales + group * 32), true);
    cp_async_4_or_zero(target + 4, static_cast<const char*>(p.zeros) + (source.zeros + group * 8), true);
  }

  struct Reader {
    u32 selector;  // of the byte with the zeros of the lane's rows, to both halves

    __device__ __forceinline__ Reader() : selector(kept(0x4040 + threadIdx.x % 16 / 4 * 0x0101)) {}

    __device__ __forceinline__ Scales spread(u32 scales, u32 zeros) const {
      const u32 both = __byte_perm(zeros, 0, selector);
      Scales result;
      result.scale[0] = __byte_perm(scales, 0, 0x1010);
      result.scale[1] = __byte_perm(scales, 0, 0x3232);
      result.zero[0] = masked_or<0x000f000f>(both, Nibbles<T>::kOffset);
      result.zero[1] = masked_or<0x000f000f>(both >> 4, Nibbles<T>::kOffset);
      return result;
    }
    __device__ __forceinline__ Scales scales(u32 source) const {
      const uint2 words = load_shared_8(source);
      return spread(words.x, words.y);
    }
    __device__ __forceinline__ Scales load(const QuantisedParams& p, const ScaleSource& source) const {
      return spread(*reinterpret_cast<const u32*>(static_cast<const char*>(p.scales) + source.scales),
                    *reinterpret_cast<const u32*>(static_cast<const char*>(p.zeros) + source.zeros));
    }
  };

  // Eight neighbouring k of the lane's row of a tile.
  static __device__ __forceinline__ uint4 expand(const uint4& unit, const Scales& scales, int half, int tile) {
    const u32 word = half ? (tile ? unit.w : unit.z) : (tile ? unit.y : unit.x);
    u32 pairs[4];
    Nibbles<T>::less_zero(pairs, word, scales.zero[tile]);
#pragma unroll
    for (int j = 0; j < 4; ++j) pairs[j] = multiply2<T>(pairs[j], scales.scale[tile]);
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
};

template <typename T, int kPanels, int kRowTiles, int kWarps, int kPlaces, int kBlocksPerSm, bool kGated>
__global__ void __launch_bounds__(kWarps * kWarp, kBlocksOfSm<kBlocksPerSm>)
    quantised_linear_int4(const __grid_constant__ QuantisedParams p) {
  quantised_rows<T, Int4<T>, kPanels, kRowTiles, kWarps, kPlaces, kGated>(p);
}

template <typename T, int kThreads>
__global__ void __launch_bounds__(kThreads) expand_int4(const __grid_constant__ QuantisedParams p) {
  expand_units<T, Int4<T>, kThreads>(p);
}

}  // namespace edgellm
