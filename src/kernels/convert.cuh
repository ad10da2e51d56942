// Conversion between float types with the results of `convert.rs`: through binary32, rounded once, to nearest even.
// Integer arithmetic, so that devices and hosts agree in every bit.

#pragma once

#include "params.cuh"

enum { F64 = 0, F32 = 1, F16 = 2, BF16 = 3, F8E4M3 = 4, F8E5M2 = 5 };

union Bits32 {
    float number;
    u32 bits;
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

__device__ __forceinline__ float load(const u8* source, i32 dtype) {
    switch (dtype) {
        case F64: return float(*reinterpret_cast<const double*>(source));
        case F32: return *reinterpret_cast<const float*>(source);
        case F16: return widen(*reinterpret_cast<const u16*>(source), 5, 10);
        case BF16: return from_bits(u32(*reinterpret_cast<const u16*>(source)) << 16);
        case F8E5M2: return widen(*source, 5, 2);
        default: break;
    }
    // float8_e4m3fn has no infinity: its largest exponent holds numbers, and one NaN.
    u32 bits = *source;
    if ((bits & 0x7f) == 0x7f) {
        return from_bits((bits & 0x80) << 24 | 0x7fc00000u);
    }
    if ((bits & 0x78) == 0x78) {
        return from_bits((bits & 0x80) << 24 | (135u << 23 | (bits & 7) << 20));
    }
    return widen(bits, 4, 3);
}

__device__ __forceinline__ void store(u8* target, i32 dtype, float value) {
    u32 bits = to_bits(value);
    u32 magnitude = bits & 0x7fffffffu;
    bool is_nan = magnitude > 0x7f800000u;
    u32 sign = bits >> 31;
    switch (dtype) {
        case F32: *reinterpret_cast<float*>(target) = value; return;
        case F16: {
            // From 65520 on the nearest is infinity.
            u32 half = is_nan ? 0x7e00u : magnitude >= 0x477ff000u ? 0x7c00u : narrow(magnitude, 10, 15);
            *reinterpret_cast<u16*>(target) = u16(sign << 15 | half);
            return;
        }
        case BF16: {
            u32 rounded = (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
            *reinterpret_cast<u16*>(target) = u16(is_nan ? 0x7fc0u : rounded);
            return;
        }
        case F8E5M2: {
            u32 eighth = is_nan ? 0x7fu : magnitude >= 0x47800000u ? 0x7cu : narrow(magnitude, 2, 15);
            *target = u8(sign << 7 | eighth);
            return;
        }
        default: {
            // 448 is the largest number.
            u32 most = 0x43e00000u;
            u32 eighth = is_nan ? 0x7fu : narrow(magnitude < most ? magnitude : most, 3, 7);
            *target = u8(sign << 7 | eighth);
        }
    }
}
