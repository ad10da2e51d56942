//! Conversion between float types, element by element.
//!
//! Every value passes through binary32 and is rounded once, to nearest, ties to even. The 8-bit formats are
//! those of the OCP 8-bit Floating Point Specification (2023): values beyond `float8_e4m3fn`, which has no
//! infinity, become its largest number; values beyond `float8_e5m2` become infinity. A NaN stays one: in an
//! 8-bit format with its sign and one payload, in others with any.

use half::{bf16, f16};

use crate::base::DType;

/// An element type that converts to binary32.
pub(super) trait ToF32: Copy {
    /// Returns the value, which a float64 may lose digits of.
    fn to_f32(self) -> f32;
}

/// An element type to which a binary32 can be rounded.
trait FromF32: Copy {
    fn from_f32(value: f32) -> Self;
}

/// A `float8_e4m3fn`.
#[derive(Clone, Copy)]
pub(super) struct E4M3(u8);

/// A `float8_e5m2`.
#[derive(Clone, Copy)]
pub(super) struct E5M2(u8);

impl ToF32 for f64 {
    #[expect(clippy::cast_possible_truncation, reason = "rounding is what a conversion does")]
    fn to_f32(self) -> f32 {
        self as f32
    }
}

impl ToF32 for f32 {
    fn to_f32(self) -> f32 {
        self
    }
}

impl ToF32 for f16 {
    fn to_f32(self) -> f32 {
        self.to_f32()
    }
}

impl ToF32 for bf16 {
    fn to_f32(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
}

impl ToF32 for E4M3 {
    fn to_f32(self) -> f32 {
        let magnitude = u32::from(self.0 & 0x7f);
        let value = match (magnitude >> 3, magnitude & 7) {
            (15, 7) => f32::NAN,
            // Subnormals count in steps of 2^-9; `mantissa` is at most 7, so the product is exact.
            (0, mantissa) => f32::from_bits((127 - 9) << 23) * small(mantissa),
            // The exponent is biased by 7, that of binary32 by 127.
            (exponent, mantissa) => f32::from_bits((exponent + 120) << 23 | mantissa << 20),
        };
        if self.0 & 0x80 == 0 { value } else { -value }
    }
}

impl ToF32 for E5M2 {
    fn to_f32(self) -> f32 {
        // The format is the upper byte of a binary16.
        f16::from_bits(u16::from(self.0) << 8).to_f32()
    }
}

/// Returns an integer below 256 as a float.
fn small(value: u32) -> f32 {
    f32::from(u8::try_from(value).expect("it is below 256"))
}

impl FromF32 for f32 {
    fn from_f32(value: f32) -> Self {
        value
    }
}

impl FromF32 for f16 {
    fn from_f32(value: f32) -> Self {
        Self::from_f32(value)
    }
}

impl FromF32 for bf16 {
    fn from_f32(value: f32) -> Self {
        // Without a branch, unlike the `half` crate, so that the compiler can vectorise it.
        let bits = value.to_bits();
        // Wraps only for NaNs, which are replaced.
        let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
        let [low, high, ..] = if value.is_nan() { 0x7fc0 } else { rounded }.to_le_bytes();
        Self::from_le_bytes([low, high])
    }
}

/// Returns the bits of `magnitude` (no sign, finite) as an 8-bit float with `mantissa_bits` and an exponent
/// biased by `bias`, rounded to nearest even and unbounded: an overflow continues past the largest finite
/// value.
fn round_to_8_bits(magnitude: u32, mantissa_bits: u32, bias: u32) -> u32 {
    let shift = 23 - mantissa_bits;
    let smallest_normal = (127 - bias + 1) << 23;
    if magnitude >= smallest_normal {
        let rebased = magnitude - ((127 - bias) << 23);
        let odd = (rebased >> shift) & 1;
        (rebased + (1 << (shift - 1)) - 1 + odd) >> shift
    } else {
        // Adding a number whose last bit equals one subnormal step rounds in hardware.
        let step = f32::from_bits((127 - bias + 1 + shift) << 23);
        (f32::from_bits(magnitude) + step).to_bits() - step.to_bits()
    }
}

fn low_byte(bits: u32) -> u8 {
    bits.to_le_bytes()[0]
}

impl FromF32 for E4M3 {
    fn from_f32(value: f32) -> Self {
        let sign = low_byte(value.to_bits() >> 24) & 0x80;
        let magnitude = value.to_bits() & 0x7fff_ffff;
        let bits = if value.is_nan() {
            0x7f
        } else {
            // 0x7e is 448, the largest number.
            round_to_8_bits(magnitude.min(448f32.to_bits()), 3, 7)
        };
        Self(sign | low_byte(bits))
    }
}

impl FromF32 for E5M2 {
    fn from_f32(value: f32) -> Self {
        let sign = low_byte(value.to_bits() >> 24) & 0x80;
        let magnitude = value.to_bits() & 0x7fff_ffff;
        let bits = if value.is_nan() {
            0x7f
        } else if magnitude >= 65536f32.to_bits() {
            0x7c
        } else {
            round_to_8_bits(magnitude, 2, 15)
        };
        Self(sign | low_byte(bits))
    }
}

/// Converts `count` elements, `stride` elements apart at `source`, to consecutive ones at `target`,
/// dividing by `divisor` first.
///
/// # Safety
/// The elements at `source` are readable, those at `target` writable, and both have the types for which the
/// function was chosen.
pub(super) type Convert =
    unsafe fn(source: *const u8, stride: isize, target: *mut u8, count: usize, divisor: f32);

/// Elements converted at a time, on the stack.
const CHUNK: usize = 256;

unsafe fn convert<S: ToF32, T: FromF32>(
    mut source: *const u8,
    stride: isize,
    mut target: *mut u8,
    count: usize,
    divisor: f32,
) {
    let mut wide = [0f32; CHUNK];
    for start in (0..count).step_by(CHUNK) {
        let wide = &mut wide[..CHUNK.min(count - start)];
        for (step, value) in (0..).zip(wide.iter_mut()) {
            let element = source.cast::<S>().wrapping_offset(step * stride);
            // SAFETY: the caller guarantees `count` readable elements, `stride` apart; they may be unaligned.
            *value = unsafe { element.read_unaligned() }.to_f32();
        }
        if divisor.to_bits() != 1f32.to_bits() {
            for value in wide.iter_mut() {
                *value /= divisor;
            }
        }
        for (step, &value) in wide.iter().enumerate() {
            // SAFETY: the caller guarantees `count` consecutive writable elements.
            unsafe { target.cast::<T>().wrapping_add(step).write_unaligned(T::from_f32(value)) };
        }
        source = source.cast::<S>().wrapping_offset(stride.wrapping_mul(CHUNK.cast_signed())).cast();
        target = target.cast::<T>().wrapping_add(CHUNK).cast();
    }
}

/// Returns the conversion from `from` to `to`, or `None` when one of them is not a float or `to` cannot be
/// stored.
pub(super) fn conversion(from: DType, to: DType) -> Option<Convert> {
    fn to_target<S: ToF32>(to: DType) -> Option<Convert> {
        match to {
            DType::F32 => Some(convert::<S, f32>),
            DType::F16 => Some(convert::<S, f16>),
            DType::BF16 => Some(convert::<S, bf16>),
            DType::F8E4M3 => Some(convert::<S, E4M3>),
            DType::F8E5M2 => Some(convert::<S, E5M2>),
            _ => None,
        }
    }
    match from {
        DType::F64 => to_target::<f64>(to),
        DType::F32 => to_target::<f32>(to),
        DType::F16 => to_target::<f16>(to),
        DType::BF16 => to_target::<bf16>(to),
        DType::F8E4M3 => to_target::<E4M3>(to),
        DType::F8E5M2 => to_target::<E5M2>(to),
        _ => None,
    }
}

unsafe fn copy<T: Copy>(source: *const u8, stride: isize, target: *mut u8, count: usize, _divisor: f32) {
    let (mut source, mut target) = (source.cast::<T>(), target.cast::<T>());
    for _ in 0..count {
        // SAFETY: the caller guarantees `count` readable elements, `stride` apart; they may be unaligned.
        let value = unsafe { source.read_unaligned() };
        // SAFETY: the caller guarantees `count` consecutive writable elements.
        unsafe { target.write_unaligned(value) };
        source = source.wrapping_offset(stride);
        target = target.wrapping_add(1);
    }
}

/// Returns the conversion of `dtype` to itself, which keeps every bit.
pub(super) fn element_copy(dtype: DType) -> Convert {
    match dtype.size() {
        1 => copy::<u8>,
        2 => copy::<u16>,
        4 => copy::<u32>,
        _ => copy::<u64>,
    }
}
