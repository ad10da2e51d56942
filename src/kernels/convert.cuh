// Conversion between float types with the results of `convert.rs`: through binary32, rounded once, to nearest even.
// Integer arithmetic but for single operations that IEEE 754 defines, and one instruction that is followed by a check, so
// that devices and hosts agree in every bit.

#pragma once

#include "params.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define HAS_FLOAT8
#endif

union Bits32 {
    float number;
    u32 bits;
};

union Bits64 {
    double number;
    u64 bits;
};

__device__ __forceinline__ float from_bits(u32 bits) {
    Bits32 both;
    both.bits = bits;
    return both.number;
}

__device__ __forceinline__ u32 to_bits(float number) {
    Bits32 both;
    both.number = number;
    return both.bits;
}

/// The finite number of `magnitude` in a float with `mantissa_bits` and an exponent biased by `bias`, where no exponent
/// is reserved for infinities.
__device__ __forceinline__ float widen(u32 magnitude, u32 mantissa_bits, u32 bias) {
    // As binary32 the bits mean a number that is too small by the difference of the biases; the product is exact, also
    // that of subnormals.
    return from_bits(magnitude << (23 - mantissa_bits)) * from_bits((254 - bias) << 23);
}

/// As `widen`, with infinities and NaNs in the largest of `exponent_bits`, and with a sign.
__device__ __forceinline__ float widen_all(u32 bits, u32 exponent_bits, u32 mantissa_bits) {
    u32 sign = bits >> (exponent_bits + mantissa_bits) << 31;
    u32 magnitude = bits & ((1u << (exponent_bits + mantissa_bits)) - 1);
    u32 wide = to_bits(widen(magnitude, mantissa_bits, (1u << (exponent_bits - 1)) - 1));
    bool is_last = magnitude >> mantissa_bits == (1u << exponent_bits) - 1;
    return from_bits(sign | wide | (is_last ? 0x7f800000u : 0));
}

/// The bits of a finite `magnitude` in a float of `mantissa_bits` and an exponent biased by `bias`, rounded to nearest
/// even. An overflow continues past the largest finite number.
__device__ __forceinline__ u32 narrow(u32 magnitude, u32 mantissa_bits, u32 bias) {
    u32 shift = 23 - mantissa_bits;
    if (magnitude >= (127 - bias + 1) << 23) {
        u32 rebased = magnitude - ((127 - bias) << 23);
        return (rebased + (1u << (shift - 1)) - 1 + (rebased >> shift & 1)) >> shift;
    }
    // Adding a number whose last bit weighs one subnormal step rounds in hardware.
    u32 step = (127 - bias + 1 + shift) << 23;
    return to_bits(from_bits(magnitude) + from_bits(step)) - step;
}

__device__ __forceinline__ u32 magnitude_of(float value) {
    return to_bits(value) & 0x7fffffffu;
}

__device__ __forceinline__ bool is_nan(float value) {
    return magnitude_of(value) > 0x7f800000u;
}

struct F64 {
    typedef u64 Bits;

    static __device__ __forceinline__ float load(u64 bits) {
        Bits64 both;
        both.bits = bits;
        return float(both.number);
    }
};

struct F32 {
    typedef u32 Bits;

    static __device__ __forceinline__ float load(u32 bits) { return from_bits(bits); }

    static __device__ __forceinline__ u32 store(float value) { return to_bits(value); }
};

struct F16 {
    typedef u16 Bits;

    static __device__ __forceinline__ float load(u16 bits) { return widen_all(bits, 5, 10); }

    static __device__ __forceinline__ u16 store(float value) {
        u32 magnitude = magnitude_of(value);
        // From 65520 on the nearest is infinity.
        u32 half = is_nan(value) ? 0x7e00u : magnitude >= 0x477ff000u ? 0x7c00u : narrow(magnitude, 10, 15);
        return u16(to_bits(value) >> 31 << 15 | half);
    }
};

struct BF16 {
    typedef u16 Bits;

    static __device__ __forceinline__ float load(u16 bits) { return from_bits(u32(bits) << 16); }

    static __device__ __forceinline__ u16 store(float value) {
        u32 bits = to_bits(value);
        return u16(is_nan(value) ? 0x7fc0u : (bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
    }
};

struct F8E4M3 {
    typedef u8 Bits;

    static __device__ __forceinline__ float load(u8 bits) {
        // The format has no infinity: its largest exponent holds numbers, and one NaN.
        u32 sign = u32(bits & 0x80) << 24;
        u32 magnitude = bits & 0x7f;
        return from_bits(sign | (magnitude == 0x7f ? 0x7fc00000u : to_bits(widen(magnitude, 3, 7))));
    }

    static __device__ __forceinline__ u8 store(float value) {
        u32 magnitude = magnitude_of(value);
        // 448 is the largest number.
        u32 most = 0x43e00000u;
        u32 eighth = is_nan(value) ? 0x7fu : narrow(magnitude < most ? magnitude : most, 3, 7);
        return u8(to_bits(value) >> 31 << 7 | eighth);
    }

    /// Two finite numbers, `low` in the lower byte. A NaN, which `store` gives its sign, becomes one of 0x7f and 0xff.
    static __device__ __forceinline__ u32 store_pair(float low, float high) {
#ifdef HAS_FLOAT8
        u16 pair;
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
        return pair;
#else
        return store_finite(low) | store_finite(high) << 8;
#endif
    }

    /// The least magnitude of a result of `store_pair` that `store` might not give.
    enum { DOUBTFUL = 0x7f };

private:
    static __device__ __forceinline__ u32 store_finite(float value) { return is_nan(value) ? 0x7f : store(value); }
};

struct F8E5M2 {
    typedef u8 Bits;

    static __device__ __forceinline__ float load(u8 bits) { return widen_all(bits, 5, 2); }

    static __device__ __forceinline__ u8 store(float value) {
        u32 magnitude = magnitude_of(value);
        // 65536 and more is infinity; what rounds up to it becomes that, too.
        u32 eighth = is_nan(value) ? 0x7fu : magnitude >= 0x47800000u ? 0x7cu : narrow(magnitude, 2, 15);
        return u8(to_bits(value) >> 31 << 7 | eighth);
    }

    /// Two numbers, `low` in the lower byte. Beyond the largest number they become that one, 57344, where `store` gives an
    /// infinity; a NaN becomes one of 0x7f and 0xff.
    static __device__ __forceinline__ u32 store_pair(float low, float high) {
#ifdef HAS_FLOAT8
        u16 pair;
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
        return pair;
#else
        return store_saturated(low) | store_saturated(high) << 8;
#endif
    }

    /// As above.
    enum { DOUBTFUL = 0x7b };

private:
    static __device__ __forceinline__ u32 store_saturated(float value) {
        u32 most = 0x47600000u;
        u32 magnitude = magnitude_of(value);
        u32 sign = to_bits(value) >> 31 << 7;
        return is_nan(value) ? 0x7f : sign | narrow(magnitude < most ? magnitude : most, 2, 15);
    }
};

/// `value / divisor` for a divisor from 2^-60 to 2^60, of which `reciprocal` is 1 / `divisor` rounded to nearest.
///
/// Where |value| is from 2^-60 to 2^60 it has every bit of the division. Let value be X and divisor D, both in [1, 2):
/// exponents only shift what follows, as nothing overflows or becomes subnormal. R is the reciprocal, |R - 1/D| <= 2^-25,
/// Q the rounded product of X and R, and u the distance of floats about X/D: 2^-23 for X >= D, else 2^-24.
///
/// 1. |Q - X/D| <= X |R - 1/D| + u/2, which is below u for X >= D, and below 1.5 u else.
/// 2. `excess` is E = Q D - X, rounded. It is a multiple of u 2^-23, and as |E| = D |Q - X/D|, it is exact where the error of
///    Q is at most u: it has 24 bits then. Else it has 25 bits and is rounded by at most |E| 2^-25.
/// 3. The result is Q - E R, rounded once. The number that is rounded differs from X/D by |E| |R - 1/D|, and by |E| R 2^-25
///    more where E is rounded: in all by less than 6 * 2^-25 u.
/// 4. It is X/D rounded unless M, a midpoint of two floats, is between the two, or one of the two. X/D never is one: X - M D
///    is a multiple of u 2^-24 and not 0, as M has one bit more than X. So |X/D - M| >= u 2^-24 / D.
/// 5. Where M is so near, X/D is from Q almost as far as M, which is 0.5 u or 1.5 u. In the first case |E| = 0.5 u D almost,
///    and |E| |R - 1/D| <= u D 2^-26, which is less than u 2^-24 / D since D < 2.
/// 6. In the second case the error of Q is beyond (1.5 - 6 * 2^-25) u, so by 1. X >= 2 - 3 * 2^-23, and X < D < 2. That leaves
///    X = 2 - 2d and 2 - 3d beside D = 2 - d, and X = 2 - 3d beside D = 2 - 2d, with d = 2^-23. In all three the result is
///    right: the tests try them, as they try other pairs.
///
/// Zeros keep their sign, and all finite numbers are themselves if the divisor is 1. Otherwise, beyond that range, a finite
/// result is a number of the same sign that is as far beyond the range of 8-bit floats as the division's, or NaN; infinities
/// become NaN.
__device__ __forceinline__ float divide(float value, float divisor, float reciprocal) {
    float quotient = value * reciprocal;
    float excess = fmaf(quotient, divisor, -value);
    return fmaf(-excess, reciprocal, quotient);
}

/// Whether one of four 8-bit floats has a magnitude of `least` or more.
__device__ __forceinline__ bool has_magnitude(u32 bytes, u32 least) {
    return (((bytes & 0x7f7f7f7fu) + (0x80 - least) * 0x01010101u) & 0x80808080u) != 0;
}

/// Sixteen numbers, divided, as 8-bit floats, the first in the lowest byte. Returns false where results of `divide` and
/// `store_pair` may be wrong: those are recognisable.
template <typename Type>
__device__ __forceinline__ bool store_quickly(const float* values, float divisor, float reciprocal, u32* bytes) {
    float held[16];
#pragma unroll
    for (u32 i = 0; i < 16; i++) {
        held[i] = divide(values[i], divisor, reciprocal);
    }
    bool is_certain = reciprocal != 0.0f;
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        const float* four = held + 4 * i;
        bytes[i] = Type::store_pair(four[0], four[1]) | Type::store_pair(four[2], four[3]) << 16;
        is_certain = is_certain && !has_magnitude(bytes[i], Type::DOUBTFUL);
    }
    return is_certain;
}

/// Sixteen numbers that are taken one by one. They are shifted each time, since registers cannot be indexed.
struct Floats {
    float held[16];

    __device__ __forceinline__ float next() {
        float first = held[0];
#pragma unroll
        for (u32 i = 0; i < 15; i++) {
            held[i] = held[i + 1];
        }
        return first;
    }
};

/// As `Floats`, of 16-bit floats of type `Type`, the first in the lowest half.
template <typename Type>
struct Halves {
    u32 held[8];

    __device__ __forceinline__ float next() {
        float first = Type::load(u16(held[0]));
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            held[i] = held[i] >> 16 | (i < 7 ? held[i + 1] << 16 : 0);
        }
        return first;
    }
};

/// As `store_quickly`, always right.
template <typename Type, typename Numbers>
__device__ __forceinline__ void store_slowly(Numbers& numbers, float divisor, u32* bytes) {
#pragma unroll 1
    for (u32 i = 0; i < 16; i++) {
        float value = numbers.next();
        // Devices do not keep the sign of a NaN that they divide.
        u32 last = Type::store(is_nan(value) ? value : value / divisor);
#pragma unroll
        for (u32 part = 4; part-- > 0;) {
            u32 lowest = bytes[part] & 0xff;
            bytes[part] = bytes[part] >> 8 | last << 24;
            last = lowest;
        }
    }
}
