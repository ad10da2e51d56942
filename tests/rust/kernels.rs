//! Conversions and row operations on the CPU.

use std::sync::Arc;

use half::{bf16, f16};
use kvpool::base::{DType, Device, Dims, ErrorKind, IndexVec};
use kvpool::index::{Move, plan_moves};
use kvpool::kernels::{RowBuffer, Store, gather_rows, move_rows, set_num_threads, store_rows, zero_rows};
use kvpool::memory::{Borrowed, Host, Region};
use proptest::prelude::*;

fn buffer(rows: usize, heads: usize, dim: usize, dtype: DType) -> RowBuffer {
    let region = Arc::new(Region::new(Arc::new(Host), rows * heads * dim * dtype.size()).expect("memory"));
    RowBuffer::new(region, 0, [rows, heads, dim], dtype).expect("inside")
}

fn content(buffer: &RowBuffer) -> Vec<u8> {
    let mut copy = vec![0; buffer.bytes()];
    let source = buffer.region().address().as_ptr();
    // SAFETY: the buffer fills a live region, and the vector is ours.
    unsafe { copy.as_mut_ptr().copy_from_nonoverlapping(source, buffer.bytes()) };
    copy
}

fn dims(values: &[usize]) -> Dims {
    Dims::new(&values.iter().map(|&n| i64::try_from(n).expect("small")).collect::<Vec<_>>()).expect("few")
}

/// `values` as a tensor of `shape` and `strides`.
fn tensor<'a, T>(values: &'a [T], dtype: DType, shape: &[usize], strides: &[usize]) -> Borrowed<'a> {
    let last: usize = shape.iter().zip(strides).map(|(n, stride)| n.saturating_sub(1) * stride).sum();
    assert!(last < values.len().max(1) && size_of::<T>() == dtype.size());
    let address = std::ptr::NonNull::from(values).cast();
    // SAFETY: the farthest element was checked to lie in the slice, which outlives the tensor.
    unsafe { Borrowed::new(address, dtype, Device::Cpu, dims(shape), dims(strides)) }
}

/// Stores `values` into a pool of `to` and returns the bytes.
fn converted(values: &[f32], to: DType, scale: Option<f32>) -> Vec<u8> {
    let target = buffer(1, 1, values.len(), to);
    let store = Store {
        name: "k",
        target: &target,
        values: tensor(values, DType::F32, &[1, values.len()], &[values.len(), 1]),
        scale,
    };
    store_rows(&[store], &IndexVec::I32(vec![0])).expect("stored");
    content(&target)
}

/// The value of an 8-bit float, computed from the definition of the format.
fn decode(code: u8, mantissa_bits: i32, bias: i32, has_infinity: bool) -> f64 {
    let sign = if code & 0x80 == 0 { 1.0 } else { -1.0 };
    let magnitude = i32::from(code & 0x7f);
    let (exponent, mantissa) = (magnitude >> mantissa_bits, magnitude & ((1 << mantissa_bits) - 1));
    let top = (1 << (7 - mantissa_bits)) - 1;
    if has_infinity && exponent == top {
        return if mantissa == 0 { sign * f64::INFINITY } else { f64::NAN };
    }
    if !has_infinity && magnitude == 0x7f {
        return f64::NAN;
    }
    let fraction = f64::from(mantissa) / f64::from(1 << mantissa_bits);
    let (implied, exponent) = if exponent == 0 { (0.0, 1) } else { (1.0, exponent) };
    sign * (implied + fraction) * f64::from(exponent - bias).exp2()
}

/// The nearest 8-bit float, ties to the even code, found by trying all of them. Beyond the largest finite
/// value, the value of the next exponent decides whether a number still rounds down.
fn nearest(value: f32, decode: impl Fn(u8) -> f64, beyond: f64, overflow: u8) -> u8 {
    let sign = if value.is_sign_negative() { 0x80 } else { 0 };
    let magnitude = f64::from(value.abs());
    if value.is_nan() {
        return sign | 0x7f;
    }
    let candidates = (0..=0x7fu8).filter(|&code| decode(code).is_finite()).map(|code| (code, decode(code)));
    let mut best = (overflow, (beyond - magnitude).abs());
    if magnitude >= beyond {
        return sign | overflow;
    }
    for (code, candidate) in candidates {
        let distance = (candidate - magnitude).abs();
        if distance < best.1 || (distance <= best.1 && code % 2 == 0) {
            best = (code, distance);
        }
    }
    sign | best.0
}

fn e4m3(code: u8) -> f64 {
    decode(code, 3, 7, false)
}

fn e5m2(code: u8) -> f64 {
    decode(code, 2, 15, true)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, ..ProptestConfig::default() })]

    #[test]
    fn eight_bit_floats_round_to_nearest_even(bits in any::<u32>(), small in -600f32..600.0) {
        for value in [f32::from_bits(bits), small, small / 512.0, small / 65536.0, small * 128.0] {
            prop_assert_eq!(converted(&[value], DType::F8E4M3, None)[0], nearest(value.clamp(-448.0, 448.0), e4m3, 480.0, 0x7e), "{}", value);
            prop_assert_eq!(converted(&[value], DType::F8E5M2, None)[0], nearest(value, e5m2, 65536.0, 0x7c), "{}", value);
        }
    }
}

#[test]
fn eight_bit_floats_come_back_exactly() {
    let codes: Vec<u8> = (0..=255).collect();
    for (dtype, decode) in [(DType::F8E4M3, e4m3 as fn(u8) -> f64), (DType::F8E5M2, e5m2)] {
        let target = buffer(1, 1, 256, DType::F32);
        let store = Store {
            name: "k",
            target: &target,
            values: tensor(&codes, dtype, &[1, 256], &[256, 1]),
            scale: None,
        };
        store_rows(&[store], &IndexVec::I32(vec![0])).expect("stored");
        for (code, bytes) in codes.iter().zip(content(&target).chunks_exact(4)) {
            let value = f64::from(f32::from_le_bytes(bytes.try_into().expect("four")));
            let expected = decode(*code);
            assert!(
                value.to_bits() == expected.to_bits() || (value.is_nan() && expected.is_nan()),
                "{code:#x}"
            );
        }
    }
}

#[test]
fn a_scale_divides_before_the_conversion() {
    assert_eq!(converted(&[448.0 * 4.0], DType::F8E4M3, Some(4.0)), [0x7e]);
    assert_eq!(converted(&[1.0], DType::F8E5M2, Some(0.5)), [0x40]);
}

#[test]
fn halves_convert_as_their_crate_does() {
    let values = [0.0f32, -0.0, 1.0, 65504.0, 65520.0, 1e-8, 0.1, f32::INFINITY, -2.5];
    let halves: Vec<u8> = values.iter().flat_map(|&value| f16::from_f32(value).to_le_bytes()).collect();
    let brains: Vec<u8> = values.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes()).collect();
    assert_eq!(converted(&values, DType::F16, None), halves);
    assert_eq!(converted(&values, DType::BF16, None), brains);
}

#[test]
fn integers_are_not_converted() {
    let target = buffer(1, 1, 2, DType::I8);
    for (values, dtype) in [(&[1u8, 2], DType::U8), (&[1, 2], DType::F8E4M3)] {
        let store = Store {
            name: "k",
            target: &target,
            values: tensor(values, dtype, &[1, 2], &[2, 1]),
            scale: None,
        };
        let error = store_rows(&[store], &IndexVec::I32(vec![0])).expect_err("no conversion");
        assert_eq!(error.kind(), ErrorKind::Type);
        assert!(error.to_string().contains("int8"), "{error}");
    }
}

/// Row `row` of `[rows, 2, 3]` uint16 holds `10 * row + element`.
fn source(rows: u16) -> Vec<u16> {
    (0..rows).flat_map(|row| (0..6).map(move |element| 10 * row + element)).collect()
}

fn words(buffer: &RowBuffer) -> Vec<Vec<u16>> {
    let bytes = content(buffer);
    let values: Vec<u16> = bytes.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]])).collect();
    values.chunks_exact(6).map(<[u16]>::to_vec).collect()
}

#[test]
fn rows_are_read_where_they_lie() {
    type Case<'a> = (&'a [usize], &'a [usize], [usize; 2], usize, usize);
    let values = source(8);
    // (shape, strides, and for each of two rows the first element and the step between heads and elements)
    let cases: [Case; 6] = [
        (&[2, 2, 3], &[6, 3, 1], [0, 6], 3, 1),
        (&[2, 6], &[12, 1], [0, 12], 3, 1),
        (&[1, 2, 2, 3], &[99, 12, 3, 1], [0, 12], 3, 1),
        (&[2, 2, 3], &[3, 20, 1], [0, 3], 20, 1),
        (&[2, 2, 3], &[1, 2, 4], [0, 1], 2, 4),
        (&[2, 6], &[1, 3], [0, 1], 9, 3),
    ];
    for (shape, strides, starts, head, element) in cases {
        let target = buffer(4, 2, 3, DType::F16);
        let store = Store {
            name: "k",
            target: &target,
            values: tensor(&values, DType::F16, shape, strides),
            scale: None,
        };
        store_rows(&[store], &IndexVec::I64(vec![3, 1])).expect("stored");
        for (row, start) in [3, 1].into_iter().zip(starts) {
            let expected: Vec<u16> = (0..6).map(|i| values[start + i / 3 * head + i % 3 * element]).collect();
            assert_eq!(words(&target)[row], expected, "{shape:?} {strides:?}");
        }
        assert_eq!(words(&target)[0], [0; 6]);
    }
}

#[test]
fn negative_indices_are_skipped_and_bad_ones_change_nothing() {
    let values = source(3);
    let target = buffer(4, 2, 3, DType::F16);
    let store = || Store {
        name: "k",
        target: &target,
        values: tensor(&values, DType::F16, &[3, 6], &[6, 1]),
        scale: None,
    };
    for bad in [IndexVec::I32(vec![0, 1, 4]), IndexVec::I64(vec![0, 1, i64::MAX])] {
        let error = store_rows(&[store()], &bad).expect_err("outside");
        assert_eq!(error.kind(), ErrorKind::Index);
        assert!(error.to_string().contains("position 2"), "{error}");
        assert!(content(&target).iter().all(|&byte| byte == 0));
    }
    store_rows(&[store()], &IndexVec::I64(vec![-1, 2, i64::MIN])).expect("skipped");
    assert_eq!(words(&target), [vec![0; 6], vec![0; 6], values[6..12].to_vec(), vec![0; 6]]);
    let error = store_rows(&[store()], &IndexVec::I32(vec![1])).expect_err("three rows for one index");
    assert_eq!(error.kind(), ErrorKind::Config);
}

#[test]
fn threads_do_not_change_results() {
    let (rows, heads, dim) = (4096usize, 8, 64);
    let values: Vec<u32> = (0..u32::try_from(rows * heads * dim).expect("small")).collect();
    // Every row of the first half occurs twice; the later value must stay.
    let indices: Vec<i32> = (0..4096).map(|position| (position * 5) % 2048).collect();
    let shape = [rows, heads, dim];
    let stored = |threads| {
        set_num_threads(threads);
        let target = buffer(rows, heads, dim, DType::F32);
        let values = tensor(&values, DType::F32, &shape, &[heads * dim, dim, 1]);
        let store = Store { name: "k", target: &target, values, scale: None };
        store_rows(&[store], &IndexVec::I32(indices.clone())).expect("stored");
        let order: Vec<u32> = (0..4096u32).rev().collect();
        let gathered = buffer(rows, heads, dim, DType::F32);
        let out = gathered
            .region()
            .borrow(0, DType::F32, dims(&shape), dims(&[heads * dim, dim, 1]))
            .expect("inside");
        gather_rows(&[(&target, out)], &order).expect("gathered");
        let both = [gathered, target];
        move_rows(&both, &plan_moves(&[1, 2, 3, 4000], &[2, 3, 1, 7])).expect("moved");
        zero_rows(&both, &[9, 4095]).expect("zeroed");
        set_num_threads(0);
        both.map(|buffer| content(&buffer))
    };
    let alone = stored(1);
    assert!(alone[1].iter().any(|&byte| byte != 0));
    assert_eq!(stored(4), alone);
}

#[test]
fn rows_outside_are_refused_before_anything_happens() {
    let buffers = [buffer(8, 1, 4, DType::U8), buffer(4, 1, 4, DType::U8)];
    assert_eq!(zero_rows(&buffers, &[0, 5]).expect_err("outside").kind(), ErrorKind::Index);
    let step = Move::Copy { dst: 0, src: 5 };
    assert_eq!(move_rows(&buffers, &[step]).expect_err("outside").kind(), ErrorKind::Index);
    let out = buffer(2, 1, 4, DType::U8);
    let borrow = |dtype, shape: &[usize], strides: &[usize]| {
        out.region().borrow(0, dtype, dims(shape), dims(strides)).expect("inside")
    };
    let gather = |out, rows: &[u32]| gather_rows(&[(&buffers[1], out)], rows).map_err(|error| error.kind());
    assert_eq!(gather(borrow(DType::U8, &[2, 1, 4], &[4, 4, 1]), &[0, 4]), Err(ErrorKind::Index));
    assert_eq!(gather(borrow(DType::U8, &[1, 1, 4], &[4, 4, 1]), &[0, 1]), Err(ErrorKind::Config));
    assert_eq!(gather(borrow(DType::U8, &[2, 1, 4], &[1, 1, 2]), &[0, 1]), Err(ErrorKind::Config));
    assert_eq!(gather(borrow(DType::I8, &[2, 1, 4], &[4, 4, 1]), &[0, 1]), Err(ErrorKind::Type));
    assert_eq!(gather(borrow(DType::U8, &[2, 1, 4], &[4, 4, 1]), &[0, 1]), Ok(()));
}
