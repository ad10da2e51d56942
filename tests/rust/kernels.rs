//! Conversions and row operations on the CPU.

use std::sync::Arc;

use kvpool::base::{DType, Device, Dims, ErrorKind, IndexVec};
use kvpool::index::{Move, plan_moves};
use kvpool::kernels::{RowBuffer, Store, gather_rows, move_rows, set_num_threads, store_rows, zero_rows};
use kvpool::memory::{Borrowed, Host, Region};

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
