// Linear layers on e4m3 weights; axes, units and the walk are in quantised.cuh.
// weight[n, k] = T(q * scale), scale float32.  A unit is 32 k: a lane's bytes are eight k of tile 0, then of tile 1.
// scales: [panel][group][row of the tile][tile] float, the rows only with `scale_step` 1.
#include "quantised.cuh"

namespace edgellm {

template <typename T>
struct Fp8 {
  static constexpr int kUnitBlocks = 1;

  struct ScaleSource {
    u32 scales;  // offset of the lane's two, of group 0
  };
  struct Scales {
    float scale[2];  // of each tile's row
  };

  static __device__ __forceinline__ u32 group_bytes(const QuantisedParams& p) { return p.scale_step ? 64 : 8; }
  static __device__ __forceinline__ ScaleSource scale_source(const QuantisedParams& p, u32 first_group) {
    return {first_group * group_bytes(p) + (p.scale_step ? threadIdx.x % kWarp / 4 * 8 : 0)};
  }
  static __device__ __forceinline__ void fetch_scales(const QuantisedParams& p, const ScaleSource& source, u32 target,
                                                      u32 group) {
    cp_async_8(target, static_cast<const char*>(p.scales) + (source.scales + group * group_bytes(p)));
  }

  struct Reader {
    __device__ __forceinline__ Scales scales(u32 source) const {
      const uint2 bits = load_shared_8(source);
      return {{__uint_as_float(bits.x), __uint_as_float(bits.y)}};
    }
    __device__ __forceinline__ Scales load(const QuantisedParams& p, const ScaleSource& source) const {
      const float2 both = *reinterpret_cast<const float2*>(static_cast<const char*>(p.scales) + source.scales);
      return {{both.x, both.y}};
    }
  };

  static __device__ __forceinline__ uint2 scaled(u32 bytes, float scale) {
    const float4 four = fp8x4_to_float4(bytes);
    return make_uint2(pack2<T>(__fmul_rn(four.x, scale), __fmul_rn(four.y, scale)),
                      pack2<T>(__fmul_rn(four.z, scale), __fmul_rn(four.w, scale)));
  }
  static __device__ __forceinline__ uint4 expand(const uint4& unit, const Scales& scales, int, int tile) {
    const uint2 low = scaled(tile ? unit.z : unit.x, scales.scale[tile]);
    const uint2 high = scaled(tile ? unit.w : unit.y, scales.scale[tile]);
    return make_uint4(low.x, low.y, high.x, high.y);
  }
};

template <typename T, int kPanels, int kRowTiles, int kWarps, int kPlaces, int kBlocksPerSm, bool kGated>
__global__ void __launch_bounds__(kWarps * kWarp, kBlocksOfSm<kBlocksPerSm>)
    quantised_linear_fp8(const __grid_constant__ QuantisedParams p) {
  quantised_rows<T, Fp8<T>, kPanels, kRowTiles, kWarps, kPlaces, kGated>(p);
}

template <typename T, int kThreads>
__global__ void __launch_bounds__(kThreads) expand_fp8(const __grid_constant__ QuantisedParams p) {
  expand_units<T, Fp8<T>, kThreads>(p);
}

}  // namespace edgellm
