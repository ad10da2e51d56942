// Conversion between float types with the results of `convert.rs`: through binary32, rounded once, to nearest even.
// Integer arithmetic but for single operations that IEEE 754 defines, so that devices and hosts agree in every bit.

#pragma once

#include "params.cuh"

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

/// A float of a sign, `exponent_bits` and `mantissa_bits`, biased by half of its range, that has infinities.
__device__ __forceinline__ float widen(u32 bits, u32 exponent_bits, u32 mantissa_bits) {
    u32 bias = (1u << (exponent_bits - 1)) - 1;
    u32 sign = bits >> (exponent_bits + mantissa_bits) << 31;
    u32 magnitude = bits & ((1u << (exponent_bits + mantissa_bits)) - 1);
    u32 shift = 23 - mantissa_bits;
    if (magnitude >> mantissa_bits == (1u << exponent_bits) - 1) {
        return from_bits(sign | 0x7f800000u | magnitude << shift);
    }
    if (magnitude >> mantissa_bits == 0) {
        // The product with a power of two is exact.
        float step = from_bits((127 - bias + 1 - mantissa_bits) << 23);
        return from_bits(sign | to_bits(float(magnitude) * step));
    }
    return from_bits(sign | ((magnitude << shift) + ((127 - bias) << 23)));
}

/// The bits of a finite `magnitude` in a float of `mantissa_bits` and an exponent biased by `bias`, rounded to nearest
/// even. What overflows runs on past the largest finite number.
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

    static __device__ __forceinline__ float load(u16 bits) { return widen(bits, 5, 10); }

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
        // It has no infinity: its largest exponent holds numbers, and one NaN.
        u32 sign = u32(bits & 0x80) << 24;
        if ((bits & 0x7f) == 0x7f) {
            return from_bits(sign | 0x7fc00000u);
        }
        if ((bits & 0x78) == 0x78) {
            return from_bits(sign | 135u << 23 | u32(bits & 7) << 20);
        }
        return widen(bits, 4, 3);
    }

    static __device__ __forceinline__ u8 store(float value) {
        u32 magnitude = magnitude_of(value);
        // 448 is the largest number.
        u32 most = 0x43e00000u;
        u32 eighth = is_nan(value) ? 0x7fu : narrow(magnitude < most ? magnitude : most, 3, 7);
        return u8(to_bits(value) >> 31 << 7 | eighth);
    }
};

struct F8E5M2 {
    typedef u8 Bits;

    static __device__ __forceinline__ float load(u8 bits) { return widen(bits, 5, 2); }

    static __device__ __forceinline__ u8 store(float value) {
        u32 magnitude = magnitude_of(value);
        // 65536 and more is infinity; what rounds up to it becomes that, too.
        u32 eighth = is_nan(value) ? 0x7fu : magnitude >= 0x47800000u ? 0x7cu : narrow(magnitude, 2, 15);
        return u8(to_bits(value) >> 31 << 7 | eighth);
    }
};
